"""What all tests of syncs share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from deltasync.delta import coding


@pytest.fixture(scope="module", autouse=True)  # a session has tests of other folders, too
def _coded_payloads_of_small_models() -> Iterator[None]:
    """Send coded payloads although those of small models are longer than what they stand for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "LONGEST", math.inf)
        yield
