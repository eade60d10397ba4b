"""A warm delta stays short: files that it runs through, and calls between them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.calls import MOST, measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels run on the GPU")
@pytest.mark.parametrize("path", dict.fromkeys(path for path, _ in MOST))
def test_a_warm_delta_takes_no_more_than_its_goal(path: str) -> None:
    for end, found in measured(path).items():
        files, calls = MOST[path, end]
        assert len(found.files) <= files, end
        assert found.edges.total() <= calls, (end, found.edges)
