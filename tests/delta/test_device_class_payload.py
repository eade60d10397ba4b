"""Payloads of `class` on a device: what the host makes of the same bytes, both ways.

Without a GPU kernels run under Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.delta.bits import Flat, Live
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.dtypes import BY_NAME, Dtype
from deltasync.errors import WrongBase
from deltasync.wire.codecs import IndexCodec
from tests.delta.device_payloads import (
    DEVICE,
    Change,
    by_device,
    by_host,
    change_of,
    decoded_alike,
    near,
    on_device,
    specs_of,
    strided,
)
from tests.delta.test_device_launches import counted
from tests.strategies import DTYPES, SEEDS

few = settings(max_examples=2 if DEVICE.type == "cpu" else 200)
BF16 = BY_NAME["bfloat16"]
DENSITIES = st.sampled_from([0.0, 0.002, 0.05, 0.4, 1.0])


def change(dtypes: list[tuple[Dtype, float]], seed: int) -> Change:
    """Parameters of these dtypes and densities, of different lengths; some begin in the middle."""
    specs = specs_of(*((dtype, 1500 + 7 * n) for n, (dtype, _) in enumerate(dtypes)))
    return change_of(specs, near(specs, [density for _, density in dtypes], seed), seed)


def typical(seed: int = 0) -> Change:
    """Coded rows of two dtypes, one that gets no shorter, and a dense one."""
    kinds = [(BF16, 0.0), (BF16, 0.05), (BY_NAME["uint8"], 1.0), (BY_NAME["float32"], 0.02)]
    return change(kinds, seed)


def coded(given: Change) -> bytes:
    made = on_device(given, IndexCodec.CLASS)
    assert made is not None
    assert made.bytes_by_codec["class"] > 0
    return made.data.cpu().numpy().tobytes()


def sent(given: Change) -> tuple[int, int]:
    return given.num_rows, len(given.payload)


@few
@given(kinds=st.lists(st.tuples(DTYPES, DENSITIES), max_size=2), seed=SEEDS)
def test_either_end_decodes_what_either_has_coded(
    kinds: list[tuple[Dtype, float]], seed: int
) -> None:
    here = change([(BF16, 0.05), *kinds], seed)  # one at least pays
    data = coded(here)
    assert decoded_alike(data, *sent(here), here.specs, here.flats) == here.raw
    old = LiveOld(here.specs, here.flats)
    made = encode_payload(here.payload.cpu().numpy(), here.num_rows, old, IndexCodec.CLASS)
    there = made.to_bytes(compressed=False)
    found = decoded_alike(there, *sent(here), here.specs, here.flats)
    assert found in (here.raw, None)  # None: the host has used other codecs, too


def test_of_what_is_not_held_any_indices_will_do() -> None:
    here = typical()
    data = coded(here)
    for missing in ({1}, {0, 1, 2, 3}):
        flats: dict[int, Live] = {n: f for n, f in here.flats.items() if n not in missing}
        assert isinstance(decoded_alike(data, *sent(here), here.specs, flats), bytes)


def test_weights_that_do_not_lie_in_runs_are_left_to_the_host() -> None:
    here = typical()
    data, flats = coded(here), strided(here.flats)
    assert by_device(data, *sent(here), here.specs, flats) is None
    assert by_host(data, *sent(here), here.specs, flats) == here.raw


@pytest.mark.parametrize("moved", [1, 30, 1500])
def test_other_old_values_are_a_wrong_base(moved: int) -> None:
    """Classes have other sizes, so that ranks lead elsewhere, or streams lead out of them."""
    here = typical()
    data = coded(here)
    flats, [(_, run)] = dict(here.flats), [one for one in here.runs if one[0] == 1]
    assert run.indices is not None
    held = flats[1].read(0, 1507).clone()
    held[run.start + int(run.indices[0]) :][:moved] ^= 0x1040
    flats[1] = Flat.of(held.view(torch.bfloat16))
    host = by_host(data, *sent(here), here.specs, flats)
    found = decoded_alike(data, *sent(here), here.specs, flats)
    assert isinstance(found, WrongBase)
    assert isinstance(host, WrongBase)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="launches are counted in the interpreter")
@pytest.mark.parametrize("parameters", [1, 6])
def test_a_payload_takes_as_many_launches_and_waits_as_any(
    monkeypatch: pytest.MonkeyPatch, parameters: int
) -> None:
    here = change([(BF16, 0.05)] * parameters, 1)
    with counted(monkeypatch) as making:
        data = coded(here)
    operations, waits = making.pop("operations"), making.pop("waits")
    assert (waits, making.total()) == (2, 33)
    assert operations < 160
    with counted(monkeypatch) as reading:
        assert by_device(data, *sent(here), here.specs, here.flats) == here.raw
    operations, waits = reading.pop("operations"), reading.pop("waits")
    assert (waits, reading.total()) == (4, 28)
    assert operations < 210


@few
@given(seed=SEEDS, flips=st.integers(1, 4), data=st.data())
def test_damage_anywhere_ends_alike(seed: int, flips: int, data: st.DataObject) -> None:
    here = typical(seed % 3)
    made = bytearray(coded(here))
    for _ in range(flips):
        at = data.draw(st.integers(0, len(made) - 1) | st.integers(0, 48 + 56 * here.num_rows))
        made[at] = data.draw(st.integers(0, 255))
    host = by_host(bytes(made), *sent(here), here.specs, here.flats)
    found = decoded_alike(bytes(made), *sent(here), here.specs, here.flats)
    if isinstance(found, Exception):
        assert isinstance(found, WrongBase) == isinstance(host, WrongBase), (found, host)
