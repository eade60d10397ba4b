"""Weights that do not lie in one run: kernels do with them what torch's operations do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.batched.staging import BatchedStaging
from deltasync.delta.batched.weights import BatchedWeights
from deltasync.delta.bits import Flat, Live, Run, integer_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codes import Codes
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import HostBackend
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.region import Region, unpaired
from deltasync.delta.route import Part, Piece
from deltasync.delta.shard import whole
from deltasync.wire.messages import ParameterSpec
from tests.worlds.payloads import payloads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
few = settings(max_examples=10 if DEVICE.type == "cpu" else 300, deadline=None)


@dataclass
class Held:
    """One parameter: what is held of it, if anything, and what a sync says of it.

    With `is_spread`, all first codes of 4 bits lie in a row, then all second ones, and so on, so
    that a word has codes of several elements.
    """

    spec: ParameterSpec
    pieces: list[Piece]
    runs: list[Run]
    is_spread: bool

    def access(self, storage: Tensor) -> Live:
        first, spec = self.pieces[0], self.spec
        if self.is_spread:
            spread = [
                Piece(one.live, one.source, replace(one.target, start=one.target.start + begin), k)
                for k, begin in enumerate(range(0, 2 * storage.nbytes, len(storage)))
                for one in self.pieces
            ]
            return Codes(spread, {"": storage}, spec.dtype, spec.numel)
        if first.source == Region.run(0, self.spec.numel):
            return Flat.of(first.target.view(storage))
        return Part.of(self.pieces, {"": storage}, name=self.spec.name)


def piece_of(draw: st.DrawFn, shape: tuple[int, ...], ranges: list[range], start: int) -> Piece:
    """A box whose dimensions lie in storage in any order, from `start` on."""
    steps = list(accumulate(reversed(shape), int.__mul__, initial=1))[-2::-1]
    live_step, dims = draw(st.integers(1, 2)), []
    for dim in draw(st.permutations(range(len(shape)))):
        dims.append((len(ranges[dim]), steps[dim], live_step))
        live_step *= len(ranges[dim])
    begin = sum(found.start * step for found, step in zip(ranges, steps, strict=True))
    return Piece.of("", *unpaired(begin, start, dims))


def pieces_of(draw: st.DrawFn, shape: tuple[int, ...], numel: int) -> list[Piece]:
    """All of it, one or two boxes of it, or nothing."""
    match draw(st.sampled_from(["nothing", "all", "boxes"])):
        case "nothing":
            return []
        case "all":
            return [piece_of(draw, shape, [range(size) for size in shape], 1)]
    bounds = sorted(draw(st.sets(st.integers(0, shape[0]), min_size=2, max_size=3)))
    others = [part_of(draw, size) for size in shape[1:]]
    return [
        piece_of(draw, shape, [range(low, high), *others], 2 * numel * nth)
        for nth, (low, high) in enumerate(pairwise(bounds))
    ]


def part_of(draw: st.DrawFn, size: int) -> range:
    low = draw(st.integers(0, size - 1))
    return range(low, draw(st.integers(low + 1, size)))


def runs_of(draw: st.DrawFn, spec: ParameterSpec, rng: np.random.Generator) -> list[Run]:
    """Sparse and dense ones of some of it."""
    runs = []
    for low, high in pairwise(sorted({0, draw(st.integers(0, spec.numel)), spec.numel})):
        share = draw(st.sampled_from([0.0, 0.3, 1.0]))
        indices = np.flatnonzero(rng.random(high - low) < share).astype(np.int32)
        bits = torch.from_numpy(rng.integers(0, 1 << 62, high - low)).to(integer_dtype(spec.dtype))
        if draw(st.booleans()):
            runs.append(Run(low, high - low, None, bits))
        elif len(indices):
            chosen = torch.from_numpy(indices)
            runs.append(Run(low, high - low, chosen, bits[: len(indices)]))
    return runs


@st.composite
def helds(draw: st.DrawFn) -> list[Held]:
    rng, found = np.random.default_rng(draw(st.integers(0, 99))), []
    for number in range(draw(st.integers(1, 4))):
        is_spread = draw(st.booleans())
        names = ["uint8", "int32", "int64"] if is_spread else ["bfloat16", "float32", "uint8"]
        dtype = dtypes.BY_NAME[draw(st.sampled_from(names))]
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        spec = ParameterSpec((f"w{number}",), shape, dtype)
        pieces = pieces_of(draw, shape, spec.numel)
        found.append(Held(spec, pieces, runs_of(draw, spec, rng), is_spread))
    return found


def bits_for(held: Held) -> Tensor:
    generator = torch.Generator().manual_seed(held.spec.numel)
    bits = torch.randint(1 << 62, (4 * held.spec.numel + 4,), generator=generator)
    return bits.to(DEVICE, integer_dtype(held.spec.dtype))


@few
@given(helds=helds(), chunk_numel=st.sampled_from([1, 5, 1000]), in_place=st.booleans())
def test_kernels_write_boxes_as_torch_does(
    helds: list[Held], chunk_numel: int, in_place: bool
) -> None:
    specs = tuple(held.spec for held in helds)
    ours, theirs = ([bits_for(held) for held in helds] for _ in range(2))
    flats, twins = (
        {number: helds[number].access(t) for number, t in enumerate(many) if helds[number].pieces}
        for many in (ours, theirs)
    )
    ledger = DigestLedger(whole(specs), chunk_numel=chunk_numel, held=flats.keys())
    ledger.sums[:] = HostBackend(twins, ledger).measure(np.arange(len(ledger.sums)))
    weights = BatchedWeights(flats, ledger, DEVICE)
    assert np.array_equal(weights.digests(), ledger.sums)
    batched = BatchedStaging(weights, ledger, in_place=in_place)
    plain = Staging(Lines(twins, len(specs)), ledger, in_place=in_place)
    reader, runs = BucketReader(specs), [(n, run) for n, h in enumerate(helds) for run in h.runs]
    for payload, num_rows in payloads(runs, specs):
        bucket = reader.open(payload.to(DEVICE), num_rows)
        batched.stage_bucket(bucket)
        plain.stage_bucket(bucket)
    assert np.array_equal(batched.ledger.sums, plain.ledger.sums)
    assert batched.commit() == plain.commit() == plain.ledger.total
    assert all(map(torch.equal, ours, theirs))
    assert np.array_equal(weights.digests(), plain.ledger.sums)
    if not in_place:
        batched.undo()
        assert all(map(torch.equal, ours, map(bits_for, helds)))
