"""Successive deltas as one sync, with or without an anchor below."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live, Run
from deltasync.delta.host.packing import Bucket, buckets, bytes_of
from deltasync.delta.patch import check_indices
from deltasync.delta.shard import whole
from deltasync.errors import LayoutMismatch
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.patch_file import flats_of
from deltasync.sync.protocol.one_way import OneWayReader
from deltasync.transports.base import Frame
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import MAX_SPARSE_SPAN

_BUCKET_BYTES = 16 << 20


def merge_delta(
    flats: dict[int, Live], specs: Sequence[ParameterSpec], frames: Iterable[Frame]
) -> None:
    """Put the next delta over weights. Memory: positions and bits of what it changes.

    Args:
        flats: The weights by parameter, which decode the delta. Those that it changes give way to
            an `Overlay`; those that are left out stay so. What was there at first is only read, and
            must not change meanwhile.
        specs: The layout.
        frames: The delta.

    Raises:
        WireError, SyncError: It is damaged: nothing has changed.
    """
    changes = dict[int, list[Run]]()
    for bucket in OneWayReader(flats=flats).read(frames):
        for parameter, run in bucket.runs():  # the memory of the bucket lives as long
            check_indices(run, name=specs[parameter].name)
            if parameter in flats and run.count:
                changes.setdefault(parameter, []).append(run)
    for parameter, runs in changes.items():
        flat = flats[parameter]
        before = flat if isinstance(flat, Overlay) else Overlay.over(flat, specs[parameter].numel)
        flats[parameter] = cast("Live", before.then(runs))


def of_anchor(
    anchor: Checkpoint, specs: Sequence[ParameterSpec], held: Collection[int]
) -> dict[int, Live]:
    """What an anchor has of the parameters that are wanted.

    Raises LayoutMismatch if it lacks one, or has it in another shape or dtype.
    """
    flats = flats_of(anchor, specs)
    if lacking := [specs[number].name for number in sorted(held) if number not in flats]:
        raise LayoutMismatch(f"the anchor lacks {lacking[0]!r}, which its layout has")
    return {number: flats[number] for number in held}


@dataclass(frozen=True, slots=True)
class Overlay:
    """A parameter with other bits at some positions: of a `Live`, what decoding asks for.

    Attributes:
        flat: The parameter itself.
        numel: Elements of it, of which this rank may hold a part.
        positions: Where it has other bits, increasing: int32[n], or int64[n] if they do not fit;
            None if it has other bits everywhere.
        bits: int[n], on the host.
    """

    flat: Live
    numel: int
    positions: Tensor | None
    bits: Tensor

    @classmethod
    def over(cls, flat: Live, numel: int) -> Overlay:
        """With its own bits everywhere."""
        dtype = torch.int32 if numel <= MAX_SPARSE_SPAN else torch.int64
        bits = torch.empty(0, dtype=flat.line.dtype, device="cpu")
        return cls(flat, numel, bits.to(dtype), bits)

    def then(self, runs: Sequence[Run]) -> Overlay:
        """The same after a delta: runs on the host, in order, disjoint, none of them empty."""
        bits = [run.bits for run in runs if run.bits is not None]
        if sum(map(len, bits)) == self.numel:
            return Overlay(self.flat, self.numel, None, torch.cat(bits))
        if self.positions is None:
            for run, one in zip(runs, bits, strict=True):
                run.write(Flat.of(self.bits), one)
            return self
        before, new = self.positions, torch.cat(bits)
        after = torch.cat([_positions(run, before.dtype) for run in runs])
        if not len(before):
            return Overlay(self.flat, self.numel, after, new)
        places = torch.searchsorted(before, after)
        is_over = before[places.clamp(max=len(before) - 1)] == after
        is_kept = torch.ones(len(before), dtype=torch.bool, device="cpu")
        is_kept[places[is_over]] = False
        places += torch.arange(len(after), device="cpu") - is_over.cumsum(0) + is_over.long()
        is_old = is_kept.new_ones(len(before) + len(after) - int(is_over.sum()))
        is_old[places] = False
        positions, merged = (one.new_empty(len(is_old)) for one in (before, self.bits))
        positions[places], positions[is_old] = after, before[is_kept]
        merged[places], merged[is_old] = new, self.bits[is_kept]
        return Overlay(self.flat, self.numel, positions, merged)

    def runs(self) -> list[Run]:
        """What differs: dense if that is everywhere, otherwise of spans that an index can count."""
        if self.positions is None:
            return [Run(0, self.numel, None, self.bits)]
        found = list[Run]()
        for start in range(0, self.numel, MAX_SPARSE_SPAN):
            span = min(MAX_SPARSE_SPAN, self.numel - start)
            positions, bits = self._between(start, start + span)
            if len(bits):
                found.append(Run(start, span, positions.to(torch.int32), bits))
        return found

    @property
    def line(self) -> Tensor:
        """That of the parameter itself: for its device and dtype only."""
        return self.flat.line

    def held(self, start: int, stop: int) -> Tensor | None:
        return self.flat.held(start, stop)

    def keeps(self, positions: Tensor) -> Tensor | None:
        return self.flat.keeps(positions)

    def read(self, start: int, stop: int) -> Tensor:
        if (held := self.held(start, stop)) is not None:
            return self.gather(held)
        if self.positions is None:
            return self.bits[start:stop].to(self.line.device)
        found, (positions, bits) = self.flat.read(start, stop).clone(), self._between(start, stop)
        Run(0, stop - start, positions, bits).write(Flat.of(found), bits)
        return found

    def gather(self, positions: Tensor) -> Tensor:
        wanted = positions.cpu()
        if self.positions is None:
            return self.bits[wanted].to(self.line.device)
        found = self.flat.gather(positions).clone()
        if len(self.positions):
            places = torch.searchsorted(self.positions, wanted.to(self.positions.dtype))
            places = places.clamp(max=len(self.positions) - 1)
            is_over = self.positions[places] == wanted
            found[is_over.to(found.device)] = self.bits[places[is_over]].to(found.device)
        return found

    def _between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(positions relative to `start`, bits) of [start, stop)."""
        assert self.positions is not None
        edges = torch.tensor([start, stop], dtype=self.positions.dtype, device="cpu")
        low, high = torch.searchsorted(self.positions, edges).tolist()
        return self.positions[low:high] - start, self.bits[low:high]


def _positions(run: Run, dtype: torch.dtype) -> Tensor:
    if run.indices is None:
        return torch.arange(run.start, run.stop, dtype=dtype, device="cpu")
    return run.indices.to(dtype) + run.start


@dataclass(frozen=True, slots=True)
class Stated:
    """The digest of a model that was not measured here."""

    total: int

    def digest_of(self, copies: object) -> int:
        """That of one copy."""
        return self.total


@dataclass(slots=True)
class StoredPlan:
    """What is stored, for `one_way_frames`, once. See `delta.backend.Plan`."""

    base_version: int | None
    sparse_bytes: int
    dense_bytes: int
    ledger: Stated
    _specs: Sequence[ParameterSpec]
    _runs: Iterable[tuple[int, Run]]

    def buckets(self) -> Iterator[Bucket]:
        """Payloads."""
        return buckets(iter(self._runs), whole(tuple(self._specs)), bucket_bytes=_BUCKET_BYTES)

    def decided(self) -> None:
        """Nothing waits for the decision."""


def plan_of_deltas(
    specs: Sequence[ParameterSpec], flats: dict[int, Live], *, base_version: int, digest: int
) -> StoredPlan:
    """What deltas change together, as one.

    Args:
        specs: The layout.
        flats: What `merge_delta` has made.
        base_version: What the first delta applies to.
        digest: State digest of the weights after the last one.
    """
    overlays = ((n, flat) for n, flat in sorted(flats.items()) if isinstance(flat, Overlay))
    runs, shares = [(n, run) for n, one in overlays for run in one.runs()], whole(tuple(specs))
    sizes = [bytes_of(shares[number], run) for number, run in runs]
    sparse, dense = (sum(column) for column in zip((0, 0), *sizes, strict=True))
    return StoredPlan(base_version, sparse, dense, Stated(digest), specs, runs)


def plan_of_anchor(
    specs: Sequence[ParameterSpec], flats: dict[int, Live], anchor: Checkpoint, *, digest: int
) -> StoredPlan:
    """All of these weights: an anchor, with the deltas after it. Memory: one parameter.

    Args:
        specs: The layout.
        flats: What is wanted of the anchor, and what `merge_delta` has made of it.
        anchor: The anchor.
        digest: State digest of the version.
    """

    def runs() -> Iterator[tuple[int, Run]]:
        for number, flat in sorted(flats.items()):
            if numel := specs[number].numel:
                yield number, Run(0, numel, None, flat.read(0, numel))
                anchor.release()

    dense_bytes = sum(specs[number].numel * specs[number].dtype.item_size for number in flats)
    return StoredPlan(None, 0, dense_bytes, Stated(digest), specs, runs())
