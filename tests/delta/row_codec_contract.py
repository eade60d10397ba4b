"""The contract that every codec of sparse rows keeps, as tests. Subclass it, and run pytest.

class TestMine(RowCodecContract):
    codec = MyCodec()
    golden = ("00...", "01...")  # the blocks of GOLDEN_ROW, never changed once released
"""

from __future__ import annotations

import tracemalloc
from typing import ClassVar

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.bits import as_bits
from deltasync.delta.codecs.base import (
    Bits,
    CodedRow,
    Indices,
    Needs,
    RowCodec,
    SparseRow,
    unsigned_dtype,
)
from deltasync.dtypes import Dtype
from deltasync.errors import WireError
from deltasync.testing.bits import flipped, random_bits
from tests.worlds.strategies import DTYPES, SEEDS

MAX_ALLOCATED_BYTES = 4 << 20  # for rows of a few thousand elements

Old = Bits
Pair = tuple[SparseRow, Old]  # and the old bits of its whole span

many = settings(suppress_health_check=[HealthCheck.differing_executors])


def row_of(new: Bits, old: Bits, dtype: Dtype, needs: Needs, extra: Indices | None = None) -> Pair:
    """The row that makes unsigned[span] `old` to `new`; `extra` are written though the same."""
    found = np.flatnonzero(new != old)
    found = found if extra is None else np.union1d(found, extra)
    indices = found.astype(np.int32)
    known = {Needs.CHANGED: old[indices], Needs.SPAN: old}
    return SparseRow(indices, new[indices], known[needs], len(old), dtype), old


def weights(span: int, density: float, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """uint16[span] new and old bfloat16 weights: small ones change more often, and by more."""
    value = (rng.standard_normal(span) * 0.02).astype(np.float32)
    size = 0.02 * density * rng.standard_normal(span).astype(np.float32)
    old, new = (whole.view(np.uint32) >> 16 for whole in (value, value + size))
    return new.astype(np.uint16), old.astype(np.uint16)


def any_pair(dtype: Dtype, span: int, density: float, seed: int) -> tuple[Bits, Bits]:
    """unsigned[span] new and old bits: special values, edge patterns and noise."""
    rng = np.random.default_rng(seed)
    old = random_bits(dtype, span, rng)
    new = flipped(old, rng.random(span) < density, rng)
    if dtype.name != "bool" and rng.random() < 0.5:
        other = as_bits(random_bits(dtype, span, rng))
        new[new != old] = other[new != old]
    if bool((new == old).all()):
        new[rng.integers(span)] ^= 1
    unsigned = unsigned_dtype(dtype)
    return new.numpy().view(unsigned), old.numpy().view(unsigned)


def coded(codec: RowCodec, pair: Pair, blocks: tuple[bytes, bytes]) -> CodedRow:
    row, old = pair
    index, value = (np.frombuffer(block, np.uint8) for block in blocks)
    known = old if codec.needs is Needs.SPAN else None
    return CodedRow(index, value, len(row.indices), row.span, row.dtype, known)


def decoded(codec: RowCodec, pairs: list[Pair], rows: list[CodedRow]) -> list[SparseRow]:
    """What rows say, their indices checked as callers do."""
    indices = codec.indices(rows)
    for found, row in zip(indices, rows, strict=True):
        assert found.dtype == np.int32
        assert len(found) == row.count
        if (np.diff(found) < 1).any() or found[0] < 0 or found[-1] >= row.span:
            raise WireError("not increasing")
    old = [pair[1][found] for pair, found in zip(pairs, indices, strict=True)]
    values = codec.values(rows, indices, old)
    return [
        SparseRow(found, value, before, row.span, row.dtype)
        for found, value, before, row in zip(indices, values, old, rows, strict=True)
    ]


def assert_round_trip(codec: RowCodec, pairs: list[Pair]) -> list[tuple[bytes, bytes]]:
    blocks = codec.encode([row for row, _ in pairs])
    rows = [coded(codec, pair, both) for pair, both in zip(pairs, blocks, strict=True)]
    for found, (row, _) in zip(decoded(codec, pairs, rows), pairs, strict=True):
        assert found.new.dtype == unsigned_dtype(row.dtype)
        assert np.array_equal(found.indices, row.indices)
        assert np.array_equal(found.new, row.new)
    return blocks


@st.composite
def bit_pairs(draw: st.DrawFn, *, max_span: int = 3000) -> tuple[Dtype, Bits, Bits]:
    """A dtype, new and old bits of which at least one differs."""
    dtype = draw(DTYPES)
    span = draw(st.integers(1, 20) | st.integers(1, max_span))
    density = draw(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]))
    return (dtype, *any_pair(dtype, span, density, draw(SEEDS)))


class RowCodecContract:
    """What callers rely on.

    Attributes:
        codec: What is tested.
        golden: The blocks of the row of `golden_row`, hexadecimal.
    """

    codec: ClassVar[RowCodec]
    golden: ClassVar[tuple[str, str]]

    def golden_row(self) -> Pair:
        old = np.arange(0x3C00, 0x3C00 + 96, 2, dtype=np.uint16)
        new = old.copy()
        new[[0, 3, 4, 20, 47]] += np.array([1, 0xFFFF, 9, 700, 0x8000], np.uint16)
        return row_of(new, old, dtypes.BY_NAME["bfloat16"], self.codec.needs)

    def test_golden_bytes(self) -> None:
        blocks = assert_round_trip(self.codec, [self.golden_row()])
        assert tuple(block.hex() for block in blocks[0]) == self.golden

    @many
    @given(cases=st.lists(bit_pairs(), min_size=1, max_size=3), extra=st.booleans(), seed=SEEDS)
    def test_round_trip(
        self, cases: list[tuple[Dtype, Bits, Bits]], extra: bool, seed: int
    ) -> None:
        """Of elements that change, and of some that are written and stay the same."""
        rng = np.random.default_rng(seed)
        pairs = []
        for dtype, new, old in cases:
            same = rng.integers(0, len(old), 5).astype(np.int32) if extra else None
            pairs.append(row_of(new, old, dtype, self.codec.needs, same))
        together = assert_round_trip(self.codec, pairs)
        assert together == [self.codec.encode([row])[0] for row, _ in pairs]

    def test_weights_at_any_density(self) -> None:
        for density in (1e-4, 1e-2, 0.3, 0.99, 30.0):
            new, old = weights(300_000, density, np.random.default_rng(1))
            pair = row_of(new, old, dtypes.BY_NAME["bfloat16"], self.codec.needs)
            (blocks,) = assert_round_trip(self.codec, [pair])
            raw = 6 * len(pair[0].indices)
            assert sum(map(len, blocks)) < 1.01 * raw + 64, density

    @many
    @given(
        case=bit_pairs(),
        seed=SEEDS,
        num_flips=st.integers(0, 4),
        cut=st.integers(-9, 9),
        other=st.tuples(st.binary(max_size=100), st.binary(max_size=100)),
    )
    def test_wrong_blocks_are_a_wire_error_or_sound_rows(
        self,
        case: tuple[Dtype, Bits, Bits],
        seed: int,
        num_flips: int,
        cut: int,
        other: tuple[bytes, bytes],
    ) -> None:
        """Damaged ones, and arbitrary ones beside one that is right or not."""
        dtype, new, old = case
        pair = row_of(new, old, dtype, self.codec.needs)
        rng = np.random.default_rng(seed)
        good = self.codec.encode([pair[0]])[0]
        for blocks in (other, (good[0], other[1]), (other[0], good[1])):
            self._decode_or_refuse(pair, blocks)
        index, value = map(bytearray, good)
        for block in (index, value)[: 1 + seed % 2]:
            for at in rng.integers(0, max(1, len(block)), num_flips if block else 0):
                block[at] = int(rng.choice(np.array([0, 1, 127, 128, 255, rng.integers(256)])))
        hit = (index, value)[seed // 2 % 2]
        hit[len(hit) + min(cut, 0) :] = bytes(max(cut, 0))
        self._decode_or_refuse(pair, (bytes(index), bytes(value)))

    def _decode_or_refuse(self, pair: Pair, blocks: tuple[bytes, bytes]) -> None:
        tracemalloc.start()
        try:
            (row,) = decoded(self.codec, [pair], [coded(self.codec, pair, blocks)])
            assert len(row.new) == len(row.indices)
            assert row.new.dtype == unsigned_dtype(row.dtype)
        except WireError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_ALLOCATED_BYTES
