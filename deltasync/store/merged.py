"""Successive deltas as one sync, with or without an anchor below."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live, Run
from deltasync.delta.host.packing import Bucket, buckets, bytes_of
from deltasync.delta.patch import check_indices
from deltasync.delta.region import Region
from deltasync.delta.shard import whole
from deltasync.dtypes import Dtype
from deltasync.errors import LayoutMismatch
from deltasync.files.checkpoint import Checkpoint
from deltasync.store.fold import fold_runs
from deltasync.sync.protocol.one_way import OneWayReader
from deltasync.transports.base import Frame
from deltasync.wire.messages import ParameterSpec

_BUCKET_BYTES = 16 << 20


class MergedDeltas:
    """Successive deltas as a single one. Memory: the bytes of all of them.

    Give each to `take`, in order. Elements that end where they began stay in it.

    Args:
        specs: The layout of all of them.
        flats: The weights that the first delta applies to, by parameter: it is decoded by them,
            later ones by what earlier deltas make of them. They are only read, and must not change
            before `take` has returned.
    """

    def __init__(self, specs: Sequence[ParameterSpec], flats: Mapping[int, Live]) -> None:
        self._specs, self._flats = specs, flats
        self._deltas: dict[int, list[list[Run]]] = {}

    def take(self, frames: Iterable[Frame]) -> None:
        """Add the next delta. Raises WireError, SyncError if it is damaged: nothing was added."""
        # Made here: kept in `self`, it would keep all weights until cycles are collected.
        flats, found = _Overlaid(self._flats, self), dict[int, list[Run]]()
        for bucket in OneWayReader(flats=flats).read(frames):
            for parameter, run in bucket.runs():  # the memory of the bucket lives as long
                check_indices(run, name=self._specs[parameter].name)
                found.setdefault(parameter, []).append(run)
        for parameter, runs in found.items():
            self._deltas.setdefault(parameter, []).append(runs)

    @property
    def changed(self) -> list[int]:
        """Numbers of the parameters that some delta brings."""
        return sorted(self._deltas)

    def runs(self, parameter: int) -> list[Run]:
        """What all deltas together write of a parameter."""
        deltas = self._deltas.get(parameter)
        if deltas is None:
            return []
        merged = fold_runs(deltas, self._specs[parameter].numel)
        self._deltas[parameter] = [merged]
        return merged

    def plan(self, *, base_version: int, digest: int) -> StoredPlan:
        """All of them as one delta.

        Args:
            base_version: What the first one applies to.
            digest: State digest of the weights after the last one.
        """
        runs = [(number, run) for number in self.changed for run in self.runs(number)]
        shares = whole(tuple(self._specs))
        sizes = [bytes_of(shares[number], run) for number, run in runs]
        sparse, dense = (sum(column) for column in zip((0, 0), *sizes, strict=True))
        return StoredPlan(base_version, sparse, dense, Stated(digest), self._specs, runs)


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


def plan_of_anchor(
    specs: Sequence[ParameterSpec],
    anchor: Checkpoint,
    later: MergedDeltas,
    *,
    held: Collection[int],
    digest: int,
) -> StoredPlan:
    """All of a model: an anchor, and the deltas after it. Memory: one parameter, and the deltas.

    Args:
        specs: The layout.
        anchor: The anchor.
        later: The deltas from it on.
        held: Numbers of the parameters that are wanted.
        digest: State digest of the version.

    Raises:
        LayoutMismatch: The anchor lacks a parameter, or has it in another shape or dtype.
    """
    flats = flats_of(anchor, specs)
    if lacking := [specs[number].name for number in sorted(held) if number not in flats]:
        raise LayoutMismatch(f"the anchor lacks {lacking[0]!r}, which its layout has")

    def runs() -> Iterator[tuple[int, Run]]:
        for number in sorted(held):
            if numel := specs[number].numel:
                flat = flats[number]
                if changes := later.runs(number):
                    flat = Flat.of(flat.tensor.clone())
                    for run in changes:
                        assert run.bits is not None
                        run.write(flat, run.bits)
                yield number, Run(0, numel, None, flat.line)
                anchor.release()

    dense_bytes = sum(specs[number].numel * specs[number].dtype.item_size for number in held)
    return StoredPlan(None, 0, dense_bytes, Stated(digest), specs, runs())


def flats_of(checkpoint: Checkpoint, specs: Sequence[ParameterSpec]) -> dict[int, Flat]:
    """The tensors of a checkpoint by their number in a layout; those that it lacks are left out.

    Raises LayoutMismatch if one has another shape or dtype than in the layout.
    """
    found = dict[int, Flat]()
    for number, spec in enumerate(specs):
        for name in spec.names:  # it may have any of them
            if (there := checkpoint.specs.get(name)) is None:
                continue
            if (there.shape, there.dtype) != (spec.shape, spec.dtype):
                raise LayoutMismatch(
                    f"{name}: the checkpoint has {there.dtype.name} {list(there.shape)}, the "
                    f"layout {spec.dtype.name} {list(spec.shape)}"
                )
            found[number] = Flat.of(checkpoint.tensor(name))
            break
    return found


@dataclass(frozen=True, slots=True)
class _OverlaidFlat:
    """A parameter with other bits where some runs write, to read; what is not held stays unknown.

    Attributes:
        flat: The parameter itself.
        runs: What would be written, on the host.
    """

    flat: Live
    runs: list[Run]

    @property
    def dtype(self) -> Dtype:
        return self.flat.dtype

    @property
    def line(self) -> Tensor:
        """That of the parameter before: for its device and dtype only."""
        return self.flat.line

    @property
    def is_contiguous(self) -> bool:
        return False

    @property
    def numel(self) -> int:
        return self.flat.numel

    def boxes(self) -> list[tuple[Region, Tensor]]:
        """None: nobody is to write here."""
        return []

    def held(self, start: int, stop: int) -> Tensor | None:
        return self.flat.held(start, stop)

    def keeps(self, positions: Tensor) -> Tensor | None:
        return self.flat.keeps(positions)

    def read(self, start: int, stop: int) -> Tensor:
        """int[k]: the bits at those positions of [start, stop) that are held, in own memory."""
        positions = self.flat.held(start, stop)
        if positions is not None:
            return self.gather(positions)
        found = self.flat.read(start, stop).clone()
        for run in self.runs:
            low, high = max(start, run.start), min(stop, run.stop)
            assert run.bits is not None
            if low >= high:
                continue
            if run.indices is None:
                found[low - start : high - start] = run.bits[low - run.start : high - run.start].to(
                    found.device
                )
                continue
            edges = torch.tensor([low - run.start, high - run.start], device="cpu")
            first, last = torch.searchsorted(run.indices, edges.to(run.indices)).tolist()
            where = run.indices[first:last].long() + (run.start - start)
            found[where.to(found.device)] = run.bits[first:last].to(found.device)
        return found

    def gather(self, positions: Tensor) -> Tensor:
        """int[n]: the bits at int64[n] positions that are held."""
        found, where = self.flat.gather(positions).clone(), positions.cpu()
        for run in self.runs:
            assert run.bits is not None
            inside = (where >= run.start) & (where < run.stop)
            at = where[inside] - run.start
            if run.indices is not None:
                place = torch.searchsorted(run.indices, at.to(run.indices.dtype))
                place = place.clamp(max=len(run.indices) - 1)
                met = run.indices[place].long() == at
                inside = inside.nonzero().view(-1)[met]
                at = place[met]
            found[inside.to(found.device)] = run.bits[at].to(found.device)
        return found

    def write(self, start: int, bits: Tensor) -> None:
        raise NotImplementedError("weights of deltas that are read")

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        raise NotImplementedError("weights of deltas that are read")


class _Overlaid(Mapping[int, Live]):
    """The weights after the deltas that were taken so far."""

    def __init__(self, flats: Mapping[int, Live], deltas: MergedDeltas) -> None:
        self._flats, self._deltas = flats, deltas

    def __getitem__(self, number: int) -> Live:
        flat, runs = self._flats[number], self._deltas.runs(number)
        return _OverlaidFlat(flat, runs) if runs else flat

    def __iter__(self) -> Iterator[int]:
        return iter(self._flats)

    def __len__(self) -> int:
        return len(self._flats)
