"""The codec `gap`: gaps and steps of any size come back, and what does not pay is not coded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta import gap
from deltasync.delta.bits import Flat, as_bits
from deltasync.delta.changes import Changes
from deltasync.delta.coding import Coder, Coding
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import Bucket
from deltasync.delta.staging import LiveWeights
from deltasync.delta.tiles import CHUNK, Space
from deltasync.wire.changes import TILE, Sizes
from tests.delta.ends import Receiver, aborted, announced, equal, packed, sole
from tests.wire import reference
from tests.worlds.bits import specs_of
from tests.worlds.payloads import POISON, begin_of


def changes_of(codes: list[int]) -> Changes:
    """One element of a byte for each code."""
    tiles, counts = np.unique(np.array(codes) // TILE, return_counts=True)
    sizes = Sizes(1, len(tiles), len(codes), 0)
    changes = Changes.of(torch.zeros(sizes.num_bytes, dtype=torch.uint8), sizes)
    changes.tiles.copy_(torch.from_numpy(tiles))
    changes.counts.copy_(torch.from_numpy(counts))
    changes.places.copy_(torch.tensor(codes) % TILE)
    return changes


def old_of(changes: Changes) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.zeros(len(bits), np.uint8) for bits in (changes.values, changes.whole))  # type: ignore[return-value]


@given(
    first=st.integers(0, 1 << 40),
    gaps=st.lists(
        st.integers(0, 600) | st.sampled_from([254, 255, 256, 510, 65_534, 65_535, 131_070]),
        min_size=1,
        max_size=50,
    ),
)
@example(first=0, gaps=[1, 300] * 40_000)  # longer than what is worked on at once
@example(first=0, gaps=[0])
@example(first=(1 << 44) - 1, gaps=[0])
def test_any_gap_comes_back(first: int, gaps: list[int]) -> None:
    codes = (first + np.cumsum([0, *(one + 1 for one in gaps[1:])])).tolist()
    changes = changes_of(codes)
    coded = gap.encode(changes, *old_of(changes))
    is_far = codes[-1] - codes[0] > 65_535 * len(codes)
    assert (coded is None) == is_far
    if coded is None:
        return
    found = Changes.of(torch.zeros(changes.num_bytes, dtype=torch.uint8), changes.sizes)
    gap.Opened(memoryview(coded), changes.sizes, found).fill(*old_of(changes))
    assert torch.equal(found.memory, changes.memory)


@given(
    st.lists(
        st.integers(0, (1 << 32) - 1).map(lambda one: TILE * one),
        min_size=2,
        max_size=3,
        unique=True,
    )
)
def test_what_is_coded_can_be_read(codes: list[int]) -> None:
    """However far apart changes are, streams stay within what a reader inflates."""
    changes = changes_of(sorted(codes))
    coded = gap.encode(changes, *old_of(changes))
    if coded is not None:
        found = Changes.of(torch.zeros(changes.num_bytes, dtype=torch.uint8), changes.sizes)
        gap.Opened(memoryview(coded), changes.sizes, found)
        assert torch.equal(found.tiles, changes.tiles)


@pytest.mark.parametrize(
    ("old", "new", "steps"),
    [
        (0x3F80, 0x3F81, "02"),
        (0x3F80, 0x3F7F, "01"),
        (0x0000, 0xFFFF, "01"),
        (0xFFFF, 0x0000, "02"),
        (0x3F80, 0x3FFF, "fe"),  # the largest step is 127
        (0x3F80, 0x3F01, "fd"),
        (0x3F80, 0x3F00, "ff003f"),
        (0x3F80, 0x4000, "ff0040"),
        (0x0000, 0x8000, "ff0080"),
    ],
)
def test_w29_steps_are_zigzagged_and_far_ones_are_new_bits(old: int, new: int, steps: str) -> None:
    one, other = (np.array([bits], np.uint16) for bits in (new, old))
    assert gap._encode_steps(one, other).hex() == steps
    assert reference.steps([new], [old], 2).hex() == steps


@pytest.mark.parametrize("size", [1, 2])
def test_steps_go_from_any_pattern_to_any(size: int) -> None:
    rng, every = np.random.default_rng(0), np.arange(1 << 8 * size).astype(f"u{size}")
    for old in (rng.permutation(every), every + every.dtype.type(1), every[::-1].copy()):
        block = np.frombuffer(gap._encode_steps(every, old), np.uint8)
        assert np.array_equal(gap._decode_steps(block, old), every)


def sparse_model() -> dict[str, Tensor]:
    return {
        "w": torch.zeros(40 * TILE, dtype=torch.int16),
        "x": torch.zeros(1000, dtype=torch.int64),
    }


def code(bucket: Bucket, coder: Coder) -> None:
    """Pack a bucket, and have its payload coded."""
    payload = torch.full((bucket.sizes.num_bytes,), POISON, dtype=torch.uint8)

    def standing() -> None:
        coder.coded(payload, bucket)

    bucket.pack(payload, standing)


@pytest.mark.parametrize("coding", ["zstd", "gap"])
def test_payloads_are_counted_by_what_took_them(coding: Coding) -> None:
    """One that gets no shorter goes as it is; one whose gaps are too long, by zstd."""
    sender = sole(sparse_model())
    sender.held["w"][::20] = 1
    sender.held["x"].random_(-(1 << 62), 1 << 62)
    coder = Coder(coding)
    for bucket in sender.delta().buckets():
        code(bucket, coder)
    assert set(coder.bytes_by_codec) == {coding, "none"}
    far = sole({"w": torch.zeros(1 << 20, dtype=torch.int8)})
    far.held["w"][[0, -1]] = 1
    coder = Coder("gap")
    for bucket in far.delta().buckets():
        _, compression = packed(bucket, "gap")
        assert compression in ("zstd", "none")


def test_gaps_are_not_made_by_bits_that_receivers_do_not_have() -> None:
    """After an abort with which the snapshot went ahead."""
    model = sparse_model()
    sender, receiver = sole(model), Receiver(model)
    sender.held["w"][::20] = 1
    aborted(sender.delta(0), 1 << 20)
    as_bits(sender.held["w"])[::10] += 1
    plan = sender.delta()
    assert all(packed(bucket, "gap")[1] != "gap" for bucket in sender.delta().buckets())
    assert receiver.sync([plan], "gap") == plan.ledger.total
    plan.decided()
    assert equal(receiver.live, sender.held)
    sender.held["w"][::20] = 7
    assert [packed(bucket, "gap")[1] for bucket in sender.delta().buckets()] == ["gap"]


def test_old_bits_of_whole_tiles_are_read_a_chunk_at_a_time() -> None:
    """Where they are not side by side: positions take 8 bytes each."""

    class Scattered(Flat):
        def held(self, start: int, stop: int) -> Tensor:
            return torch.arange(start, stop)

        def gather(self, positions: Tensor) -> Tensor:
            most.append(len(positions))
            return super().gather(positions)

    model, most = {"w": torch.arange(3 * CHUNK + 7, dtype=torch.int32)}, list[int]()
    line = Flat.of(model["w"])
    flat = Scattered(line.tensor, line.dtype, line.line, line.numel, is_contiguous=True)
    sender, live = sole(model), LiveWeights({0: flat}, Space(whole(specs_of(model))))
    sender.held["w"] += 1
    [bucket] = sender.delta(bucket_bytes=1 << 24).buckets()
    payload, compression = packed(bucket, "gap")
    reader = PayloadReader(live)
    reader.begin(begin_of(payload_bytes=bucket.sizes.num_bytes, places=0))
    received = reader.read(announced(bucket, compression), payload)
    assert (compression, received.changes.sizes.places) == ("gap", 0)
    assert torch.equal(received.changes.whole[: len(model["w"])], sender.held["w"])
    assert max(most) <= CHUNK


def test_changes_of_which_no_host_has_the_old_bits_are_compressed() -> None:
    """Those of a GPU. A sender that is asked for more there is refused when it is made."""
    sender = sole(sparse_model())
    sender.held["w"][::20] = 1
    [bucket] = sender.delta().buckets()
    assert [packed(one, "gap")[1] for one in (bucket, replace(bucket, old=None))] == ["gap", "zstd"]
