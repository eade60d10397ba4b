"""Successive deltas as one sync, with or without an anchor below."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

    Attributes:
        runs: What all deltas together write, by parameter.
    """

    def __init__(self, specs: Sequence[ParameterSpec], flats: Mapping[int, Live]) -> None:
        self._specs, self._flats = specs, flats
        self.runs: dict[int, list[Run]] = {}

    def take(self, frames: Iterable[Frame]) -> None:
        """Add the next delta. Raises WireError, SyncError if it is damaged: nothing was added."""
        held = [number for number in self.runs if number in self._flats]
        patched = {n: cast("Live", _PatchedFlat(self._flats[n], self.runs[n])) for n in held}
        reader, found = OneWayReader(flats={**self._flats, **patched}), dict[int, list[Run]]()
        for bucket in reader.read(frames):
            for parameter, run in bucket.runs():  # the memory of the bucket lives as long
                check_indices(run, name=self._specs[parameter].name)
                found.setdefault(parameter, []).append(run)
        for parameter, runs in found.items():
            before = self.runs.get(parameter, [])
            self.runs[parameter] = fold_runs([before, runs], self._specs[parameter].numel)

    def plan(self, *, base_version: int, digest: int) -> StoredPlan:
        """All of them as one delta.

        Args:
            base_version: What the first one applies to.
            digest: State digest of the weights after the last one.
        """
        runs = [(number, run) for number in sorted(self.runs) for run in self.runs[number]]
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
                if changes := later.runs.get(number):
                    flat = Flat.of(flat.tensor.clone())
                    for run in changes:
                        assert run.bits is not None
                        run.write(flat, run.bits)
                yield number, Run(0, numel, None, flat.line)
                anchor.release()

    dense_bytes = sum(specs[number].numel * specs[number].dtype.item_size for number in held)
    return StoredPlan(None, 0, dense_bytes, Stated(digest), specs, runs())


@dataclass(frozen=True, slots=True)
class _PatchedFlat:
    """A parameter with other bits where some runs write: of a `Live`, what decoding asks for.

    Attributes:
        flat: The parameter itself.
        runs: What would be written, on the host.
    """

    flat: Live
    runs: list[Run]

    @property
    def line(self) -> Tensor:
        """That of the parameter before: for its device and dtype only."""
        return self.flat.line

    def held(self, start: int, stop: int) -> Tensor | None:
        return self.flat.held(start, stop)

    def keeps(self, positions: Tensor) -> Tensor | None:
        return self.flat.keeps(positions)

    def read(self, start: int, stop: int) -> Tensor:
        return self.gather(torch.arange(start, stop, device=self.line.device))

    def gather(self, positions: Tensor) -> Tensor:
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
