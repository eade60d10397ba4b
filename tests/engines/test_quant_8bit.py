"""Forms have the bits of what engines and makers of checkpoints make themselves."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.engines import quantizers
from tests.engines.environment import use_sglang
from tests.engines.quantizers import Quantizer

pytestmark = pytest.mark.timeout(300)

INSTALLED = quantizers.installed()


@pytest.mark.parametrize("quantizer", INSTALLED, ids=str)
def test_bits_are_those_of_the_engine(quantizer: Quantizer) -> None:
    assert quantizers.all_differing(quantizer) == []


def test_bits_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    use_sglang(monkeypatch)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(quantizers.differing_in_sglang).result(timeout=200) == []
