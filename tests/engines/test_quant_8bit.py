"""Forms have the bits of what engines and makers of checkpoints make themselves."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.quant.mxfp8 import MxFp8
from tests.engines import quantizers
from tests.engines.environment import use_sglang
from tests.engines.quantizers import Quantizer
from tests.quant.kinds import FINITE, KINDS, matrix

pytestmark = pytest.mark.timeout(300)

INSTALLED = quantizers.installed()


@pytest.mark.parametrize("quantizer", INSTALLED, ids=str)
def test_bits_are_those_of_the_engine(quantizer: Quantizer) -> None:
    assert quantizers.all_differing(quantizer) == []


def test_bits_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    use_sglang(monkeypatch)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(quantizers.differing_in_sglang).result(timeout=200) == []


@pytest.mark.parametrize("quantizer", INSTALLED, ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_any_matrix_has_the_bits_of_the_engine(quantizer: Quantizer, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(FINITE if quantizer.finite else KINDS))
    rows = data.draw(st.integers(1, 300))
    step = 32 if isinstance(quantizer.form, MxFp8) else 1
    cols = step * data.draw(st.integers(1, 300 // step))
    weight = matrix(kind, (rows, cols), data.draw(st.integers(0, 2**32)))
    assert quantizers.differing(quantizer, weight) == []
