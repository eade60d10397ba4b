"""The contract that every codec of a bucket keeps, as tests. Subclass `CodecContract`, run pytest.

A codec is what stands between the runs of a sync and the bytes of a payload: the index and the
value codec that the rows of a patch table name.

class TestMine(CodecContract):
    golden = "0000000001..."  # the payload of GOLDEN_RUNS, never changed once released

    def encode(self, runs, specs):
        return my_payload(runs, specs), len(runs)

    def decode(self, payload, num_rows, specs):
        return my_runs(payload, num_rows, specs)
"""

from __future__ import annotations

import tracemalloc
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Run, integer_dtype
from deltasync.errors import WireError
from deltasync.testing.bits import random_bits
from deltasync.wire.messages import ParameterSpec
from tests.worlds.strategies import DTYPES, SEEDS

Runs = list[tuple[int, Run]]
Specs = tuple[ParameterSpec, ...]

MAX_ALLOCATED_BYTES = 1 << 20  # for payloads of a few hundred bytes


@dataclass(frozen=True, slots=True)
class Coded:
    """Runs and the layout that numbers them."""

    specs: Specs
    runs: Runs


def _spec(name: str, shape: tuple[int, ...], dtype: str) -> ParameterSpec:
    return ParameterSpec((name,), shape, dtypes.BY_NAME[dtype])


GOLDEN_SPECS: Specs = (
    _spec("a", (2, 3), "bfloat16"),
    _spec("b", (5,), "uint8"),
    _spec("c", (), "float64"),
)
GOLDEN_RUNS: Runs = [
    (
        0,
        Run(
            1,
            5,
            torch.tensor([0, 2, 4], dtype=torch.int32),
            torch.tensor([-(1 << 15), 0x7FC1, 1], dtype=torch.int16),  # -0.0, a NaN, a denormal
        ),
    ),
    (1, Run(0, 5, None, torch.tensor([0, 1, 2, 254, 255], dtype=torch.uint8))),
    (2, Run(0, 1, None, torch.tensor([-1], dtype=torch.int64))),
]


@st.composite
def coded(draw: st.DrawFn) -> Coded:
    """Runs of several parameters of several dtypes, ordered and disjoint."""
    rng = np.random.default_rng(draw(SEEDS))
    kinds = draw(st.lists(st.tuples(DTYPES, st.booleans()), min_size=1, max_size=6))
    specs: list[ParameterSpec] = []
    runs: Runs = []
    for number, (dtype, sparse) in enumerate(kinds):
        numel = int(rng.integers(1, 40))
        start = int(rng.integers(numel))
        span = int(rng.integers(1, numel - start + 1))
        specs.append(ParameterSpec((f"w{number}",), (numel,), dtype))
        chosen = None
        if sparse:
            count = int(rng.integers(1, span + 1))
            chosen = torch.from_numpy(np.sort(rng.choice(span, count, replace=False))).int()
        bits = random_bits(dtype, span if chosen is None else len(chosen), rng)
        runs.append((number, Run(start, span, chosen, bits)))
    return Coded(tuple(specs), runs)


class CodecContract(ABC):
    """What both ends rely on.

    Attributes:
        golden: The payload of GOLDEN_RUNS, hexadecimal.
    """

    golden: ClassVar[str]

    @abstractmethod
    def encode(self, runs: Runs, specs: Specs) -> tuple[Tensor, int]:
        """uint8[n] payload that says `runs`, and its rows."""

    @abstractmethod
    def decode(self, payload: Tensor, num_rows: int, specs: Specs) -> Runs:
        """The runs of a payload; their indices are not looked at. Raises WireError."""

    def test_golden_bytes(self) -> None:
        payload, num_rows = self.encode(GOLDEN_RUNS, GOLDEN_SPECS)
        assert num_rows == len(GOLDEN_RUNS)
        assert bytes(payload.tolist()).hex() == self.golden
        assert_same(self.decode(payload, num_rows, GOLDEN_SPECS), GOLDEN_RUNS, GOLDEN_SPECS)

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(case=coded())
    def test_round_trip(self, case: Coded) -> None:
        payload, num_rows = self.encode(case.runs, case.specs)
        assert_same(self.decode(payload, num_rows, case.specs), case.runs, case.specs)

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(
        case=coded(),
        seed=SEEDS,
        other=st.none() | st.binary(max_size=400),
        num_rows=st.integers(1, 20) | st.just((1 << 32) - 1),
    )
    def test_wrong_bytes_are_a_wire_error_or_sound_runs(
        self, case: Coded, seed: int, other: bytes | None, num_rows: int
    ) -> None:
        """Too few or too many are an error, damaged and arbitrary ones may be sound."""
        rng = np.random.default_rng(seed)
        payload, own_rows = self.encode(case.runs, case.specs)
        longer = torch.zeros(int(rng.integers(1, 65)), dtype=torch.uint8)
        for wrong in (payload[: rng.integers(len(payload))].clone(), torch.cat([payload, longer])):
            with pytest.raises(WireError):
                self.decode(wrong, own_rows, case.specs)
        damaged = payload.clone()
        for at in rng.integers(0, len(payload), rng.integers(1, 5)).tolist():
            damaged[at] = int(rng.choice(np.array([0, 1, 127, 128, 255, rng.integers(256)])))
        self._decode_or_refuse(damaged, own_rows, case.specs)
        if other is not None:
            anything = torch.tensor(list(other), dtype=torch.uint8)
            self._decode_or_refuse(anything, num_rows, case.specs)

    def _decode_or_refuse(self, payload: Tensor, num_rows: int, specs: Specs) -> None:
        """Whatever comes back lies within its parameters, and little memory was taken for it."""
        tracemalloc.start()
        try:
            runs = self.decode(payload, num_rows, specs)
        except WireError:
            runs = []
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_ALLOCATED_BYTES
        assert_sound(runs, specs)


def assert_sound(runs: Runs, specs: Specs) -> None:
    """Every run lies within its parameter, after the one before, with one value an index."""
    last = (0, 0)
    for number, run in runs:
        spec = specs[number]
        assert run.bits is not None
        assert run.bits.dtype == integer_dtype(spec.dtype)
        assert len(run.bits) == run.count >= 1
        assert 0 <= run.start < run.stop <= spec.numel
        assert (number, run.start) >= last
        last = (number, run.stop)


def assert_same(found: Runs, wanted: Runs, specs: Specs) -> None:
    """Two lists of runs say the same, bit for bit."""
    assert_sound(found, specs)
    assert len(found) == len(wanted)
    for (number, run), (other_number, other) in zip(found, wanted, strict=True):
        assert (number, run.start, run.span) == (other_number, other.start, other.span)
        assert _listed(run.indices) == _listed(other.indices)
        assert _listed(run.bits) == _listed(other.bits)


def _listed(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else tensor.tolist()
