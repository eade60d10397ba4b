"""What is stored, as one sync: deltas that follow each other, with or without an anchor below."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live, Run
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.fold import fold_runs
from deltasync.delta.host.packing import Bucket, buckets, bytes_of
from deltasync.delta.patch import check_indices
from deltasync.delta.region import Region
from deltasync.delta.shard import Share, whole
from deltasync.dtypes import Dtype
from deltasync.errors import DigestMismatch, LayoutMismatch, VersionGap, WrongStream
from deltasync.files.checkpoint import Checkpoint
from deltasync.sync.protocol.one_way import OneWayReader
from deltasync.transports.base import Frame
from deltasync.wire.messages import ParameterSpec

_BUCKET_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Total:
    """The digest of a model that was not measured here."""

    total: int

    def digest_of(self, copies: object) -> int:
        """That of one copy."""
        return self.total


class FoldedDeltas:
    """Successive deltas as a single one. Memory: the bytes of all of them.

    Give each to `take`, in order. `plan` is what `one_way_frames` writes as one delta, which is
    again one that can be stored. Elements that end where they began stay in it.

    Args:
        flats: The weights that the first delta applies to, by parameter: coded payloads are decoded
            by them, later ones by what earlier deltas make of them. They are only read, and must
            not change before `take` has returned. None to refuse coded payloads.

    Attributes:
        stream_id: The run; empty before the first delta.
        base_version: What the first delta applies to; None before that.
        version: What the last one leads to.
        specs: The layout.
        base_digest: State digest of the weights before.
    """

    def __init__(self, flats: Mapping[int, Live] | None = None) -> None:
        self._flats = flats
        self.stream_id = ""
        self.base_version: int | None = None
        self.version = -1
        self.specs: tuple[ParameterSpec, ...] = ()
        self.base_digest = self._digest = 0
        self._deltas: dict[int, list[list[Run]]] = {}

    def take(self, frames: Iterable[Frame]) -> None:
        """Add the next delta.

        Raises:
            VersionGap: It does not follow the one before. Nothing was added.
            WrongStream: It is of another run.
            LayoutMismatch: Its parameters are others.
            DigestMismatch: It was made from other weights than the one before leads to.
            WireError, SyncError: It is damaged.
        """
        # Made here: kept in `self`, it would keep all weights until cycles are collected.
        flats = None if self._flats is None else _Overlaid(self._flats, self)
        reader, found = OneWayReader(flats=flats), dict[int, list[Run]]()
        for frame in frames:
            had_begun = reader.begin is not None
            _, bucket = reader.take(frame)
            if not had_begun and reader.begin is not None:
                self._check_follows(reader)
            if bucket is not None:
                _collect(bucket, found)
        reader.check_sealed()
        self._extend(reader, found)

    def runs(self, parameter: int) -> list[Run]:
        """What all deltas together write of a parameter."""
        deltas = self._deltas.get(parameter, [])
        numel = self.specs[parameter].numel if deltas else 0
        folded = fold_runs(deltas, numel)
        if deltas:
            self._deltas[parameter] = [folded]
        return folded

    @property
    def changed(self) -> list[int]:
        """Numbers of the parameters that some delta brings."""
        return sorted(self._deltas)

    @property
    def digest(self) -> int:
        """State digest of the weights after the last delta."""
        return self._digest

    def plan(self) -> FoldedPlan:
        """All of them as one delta, for `one_way_frames`."""
        runs = list(self.all_runs())
        return FoldedPlan.of(self.specs, runs, base_version=self.base_version, digest=self._digest)

    def all_runs(self) -> Iterator[tuple[int, Run]]:
        """(parameter, run) of all that is written, in layout order."""
        for parameter in self.changed:
            for run in self.runs(parameter):
                yield parameter, run

    def _check_follows(self, reader: OneWayReader) -> None:
        layout, begin = reader.layout, reader.begin
        assert layout is not None
        assert begin is not None
        if begin.base_version is None:
            raise VersionGap(held=self.base_version, base=0, offered=begin.version)
        if self.base_version is None:
            return
        if begin.stream_id != self.stream_id:
            raise WrongStream(f"a delta of {begin.stream_id!r} after one of {self.stream_id!r}")
        if begin.base_version != self.version:
            raise VersionGap(held=self.version, base=begin.base_version, offered=begin.version)
        if reader.specs != self.specs:
            raise LayoutMismatch("the deltas to be folded have different parameters")
        if int(layout.digest, 16) != self._digest:
            raise DigestMismatch(f"v{self.version} is not what the next delta was made from")

    def _extend(self, reader: OneWayReader, found: dict[int, list[Run]]) -> None:
        layout, begin, sealed = reader.layout, reader.begin, reader.sealed
        assert layout is not None
        assert begin is not None
        assert sealed is not None
        if self.base_version is None:
            self.stream_id, self.specs = begin.stream_id, reader.specs
            self.base_version, self.base_digest = begin.base_version, int(layout.digest, 16)
        self.version, self._digest = begin.version, int(sealed.digest, 16)
        for parameter, runs in found.items():
            self._deltas.setdefault(parameter, []).append(runs)


@dataclass(frozen=True, slots=True)
class OverlaidFlat:
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

    def __init__(self, flats: Mapping[int, Live], deltas: FoldedDeltas) -> None:
        self._flats, self._deltas = flats, deltas

    def __getitem__(self, number: int) -> Live:
        flat, runs = self._flats[number], self._deltas.runs(number)
        return OverlaidFlat(flat, runs) if runs else flat

    def __iter__(self) -> Iterator[int]:
        return iter(self._flats)

    def __len__(self) -> int:
        return len(self._flats)


@dataclass(slots=True)
class FoldedPlan:
    """Changes of several versions as one delta. See `delta.backend.Plan`."""

    base_version: int | None
    sparse_bytes: int
    dense_bytes: int
    ledger: _Total
    _shares: Sequence[Share]
    _runs: Sequence[tuple[int, Run]]

    @classmethod
    def of(
        cls,
        specs: Sequence[ParameterSpec],
        runs: Sequence[tuple[int, Run]],
        *,
        base_version: int | None,
        digest: int,
    ) -> Self:
        """Plan.

        Args:
            specs: The layout.
            runs: (parameter, run) of all that is written, in layout order.
            base_version: What it fits on.
            digest: State digest of the weights after it.
        """
        shares = whole(tuple(specs))
        sizes = [bytes_of(shares[parameter], run) for parameter, run in runs]
        return cls(
            base_version,
            sum(sparse_bytes for sparse_bytes, _ in sizes),
            sum(dense_bytes for _, dense_bytes in sizes),
            _Total(digest),
            shares,
            runs,
        )

    def buckets(self) -> Iterator[Bucket]:
        """Payloads."""
        return buckets(iter(self._runs), self._shares, bucket_bytes=_BUCKET_BYTES)

    def decided(self) -> None:
        """Nothing waits for the decision."""


def _collect(bucket: ReadBucket, found: dict[int, list[Run]]) -> None:
    """Keep the rows of a bucket: its memory lives as long."""
    for parameter, run in bucket.runs():
        check_indices(run, name=bucket.specs[parameter].name)
        found.setdefault(parameter, []).append(run)


class AnchoredVersion:
    """All of a model: an anchor, and the deltas after it. Memory: one parameter, and the deltas.

    Args:
        specs: The layout.
        anchor: The anchor.
        later: The deltas from it on; None if there are none.
        held: Numbers of the parameters that are wanted; None for all.
        digest: State digest of the version.

    Raises:
        LayoutMismatch: The anchor lacks a parameter, or has it in another shape or dtype.
    """

    def __init__(
        self,
        specs: tuple[ParameterSpec, ...],
        anchor: Checkpoint,
        later: FoldedDeltas | None,
        *,
        held: Collection[int] | None = None,
        digest: int,
    ) -> None:
        self.base_version: int | None = None
        self.sparse_bytes = 0
        self._specs, self._anchor, self._later = specs, anchor, later
        self._numbers = range(len(specs)) if held is None else sorted(held)
        self.ledger = _Total(digest)
        self._names = {number: _name_in(anchor, specs[number]) for number in self._numbers}
        self.dense_bytes = sum(
            specs[number].numel * specs[number].dtype.item_size for number in self._numbers
        )

    def buckets(self) -> Iterator[Bucket]:
        """Every parameter that is wanted, dense."""
        return buckets(self._runs(), whole(self._specs), bucket_bytes=_BUCKET_BYTES)

    def decided(self) -> None:
        """Nothing waits for the decision."""

    def flat(self, parameter: int) -> Flat:
        """A parameter of the version: a view of the anchor, or a copy if deltas change it."""
        flat = Flat.of(self._anchor.tensor(self._names[parameter]))
        later = self._later.runs(parameter) if self._later is not None else []
        if later:
            flat = Flat.of(flat.tensor.clone())
            for run in later:
                assert run.bits is not None
                run.write(flat, run.bits)
        return flat

    def _runs(self) -> Iterator[tuple[int, Run]]:
        for number in self._numbers:
            if numel := self._specs[number].numel:
                yield number, Run(0, numel, None, self.flat(number).line)
                self._anchor.release()


def named_in(checkpoint: Checkpoint, spec: ParameterSpec) -> str | None:
    """The name by which a checkpoint has a parameter, which may have several; None if it has not.

    Raises LayoutMismatch if it has another shape or dtype there.
    """
    for name in spec.names:
        if (found := checkpoint.specs.get(name)) is not None:
            if (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise LayoutMismatch(
                    f"{name}: the checkpoint has {found.dtype.name} {list(found.shape)}, the "
                    f"layout {spec.dtype.name} {list(spec.shape)}"
                )
            return name
    return None


def _name_in(anchor: Checkpoint, spec: ParameterSpec) -> str:
    name = named_in(anchor, spec)
    if name is None:
        raise LayoutMismatch(f"the anchor lacks {spec.name!r}, which its layout has")
    return name
