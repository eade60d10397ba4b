"""What a sender sends: the source's weights, and the snapshot of what receivers hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from deltasync.delta.choice import snapshot_of
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.shard import (
    ShardSpec,
    Share,
    is_sharded,
    local_of,
    narrowed,
    overlap,
    rows_of,
    whole,
)
from deltasync.delta.snapshot import MIN_BUCKET_BYTES, Digests, Plan, Snapshot
from deltasync.delta.streams import OwnStream, own_stream
from deltasync.delta.tiles import Ints
from deltasync.errors import ConfigError, SourceChanged
from deltasync.sync.options import SenderOptions, leaves_out
from deltasync.sync.protocol.sender_session import Copies
from deltasync.sync.source.layout import SentLayout, source_specs, specs_of, with_elements
from deltasync.sync.source.tensors import (
    Maxima,
    NamedTensor,
    WeightSource,
    held_of,
    maxima_of,
)
from deltasync.wire.messages import ParameterSpec

if TYPE_CHECKING:  # which orders what is here
    from deltasync.sync.group.weights import GroupWeights

_NAMES = attrgetter("names")

Masters: TypeAlias = dict[int, tuple[int, ...]]
"""By parameter: sums of the bits that are rounded for members. Nothing, if they are sent as they
are: then each step that changes the parameter is sent.
"""


class LocalWeights:
    """The weights that this process compares and sends: one layout, and one snapshot.

    Attributes:
        options: Sizes, codec, dtypes.
        layout: What travels; nothing before the first capture.
        snapshot_bytes: Of the copy that this rank keeps.
        is_lost: Whether a part of the snapshot is gone: another capture has to come first.
        stream: On a GPU, what compares and packs; None elsewhere.
        is_released: Whether the source may have changed since the call under way has begun.
    """

    layout: SentLayout = SentLayout(())
    is_lost: bool = False
    snapshot_bytes: int = 0

    def __init__(self, options: SenderOptions) -> None:
        self.options = options
        self.stream: OwnStream | None = None
        self._snapshot: Snapshot | None = None
        self._on_source_read: Callable[[], None] | None = None
        self._is_looked_up = self.is_released = False

    @property
    def digests(self) -> Digests:
        """Of the version that the snapshot holds."""
        return self.snapshot.ledger

    @property
    def snapshot(self) -> Snapshot:
        """What the next delta is taken against. Not owned. Raises ConfigError before a capture."""
        if self._snapshot is None:
            raise ConfigError("no weights were taken yet")
        return self._snapshot

    @contextmanager
    def one_call(self, on_source_read: Callable[[], None] | None) -> Iterator[None]:
        """What is done inside is one call of `WeightSender.send_weights`.

        On a GPU it runs on `stream`: the caller's stream goes on meanwhile, and what is enqueued
        there afterwards comes after it, so it may change the source.
        """
        self._on_source_read, self.is_released = on_source_read, False
        self._is_looked_up &= on_source_read is not None
        try:
            with nullcontext() if self.stream is None else self.stream.entered():
                yield
        finally:
            self._is_looked_up = False
            if self.stream is not None:
                self.stream.join()

    def release(self) -> bool:
        """It is read no more. Returns whether it may change, on GPUs by what is enqueued later."""
        if self._on_source_read is not None and not self.is_released:
            self.is_released = True
            if self.stream is not None:
                self.stream.join()
            self._on_source_read()
        return self.is_released

    def refresh_source(self) -> None:
        """Look the source up, which the next `delta` then need not. Raises SourceChanged."""

    def declared(self, *, timeout_s: float = 60.0) -> tuple[ParameterSpec, ...]:
        """What the source holds, in the dtypes that it has. Raises SyncAborted, ConfigError."""
        raise NotImplementedError

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        """Start from the source as it is, in the dtypes that a receiver holds.

        Raises ConfigError or WireError where the two do not fit; then nothing has changed.
        """
        raise NotImplementedError

    def learn_digests(self, kinds: Collection[Copies | None]) -> None:
        """Let `digests` include these too, if it does not have all. Raises SyncAborted."""

    def delta(self, base_version: int) -> Plan:
        """How the source differs from the snapshot, as `Snapshot.compare`. Raises SourceChanged."""
        raise NotImplementedError

    def full(self, *, ways: int = 1) -> Plan:
        """All of the snapshot; in smaller payloads, if receivers get them from so many ranks."""
        snapshot = self.snapshot
        bucket_bytes = max(self._bucket_bytes(snapshot) // ways, MIN_BUCKET_BYTES)
        return snapshot.full(bucket_bytes=bucket_bytes)

    def masters(self, numbers: Collection[int]) -> Masters:
        """Of those of some parameters that are trained, and in which every step shows.

        A step of 1e-6 does not show in a bfloat16 of 1. Nothing is known of what is computed, or
        not held here.
        """
        return {}

    def _bucket_bytes(self, snapshot: Snapshot) -> int:
        return self.options.bucket_bytes or snapshot.bucket_bytes


Weights: TypeAlias = "LocalWeights | GroupWeights"
"""The model of a trainer, wherever its parts are."""


class OwnWeights(LocalWeights):
    """The weights of a trainer of one rank; or those that one of several compares and sends.

    Args:
        source: The parameters; read, never written.
        options: Sizes, codec, dtypes.
    """

    layout: SourceLayout

    def __init__(self, source: WeightSource, options: SenderOptions) -> None:
        super().__init__(options)
        self.source = _Kept(source, options) if options.leave_out else source
        self._nothing = self.layout = SourceLayout(self.source, (), [])

    def declared(self, *, timeout_s: float = 60.0) -> tuple[ParameterSpec, ...]:
        return with_elements(source_specs(self.source.tensors()))

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        self.capture_as(specs_of(self.declared(), held, self.options.wire_dtypes))

    def maxima(self) -> dict[str, Maxima]:
        """What ranks have to agree on before `delta`, of the weights as they are now.

        Raises SourceChanged.
        """
        if not self._is_looked_up:
            self.refresh_source()
        return maxima_of(self.layout.tensors)

    def capture_as(
        self,
        specs: Sequence[ParameterSpec],
        boxes: Mapping[str, ShardSpec] | None = None,
        tensors: list[NamedTensor] | None = None,
    ) -> None:
        """Start from the source as it is. Arguments as of `SourceLayout`."""
        self._is_looked_up = False
        tensors = self.source.tensors() if tensors is None else tensors
        layout = SourceLayout(self.source, specs, tensors, boxes)
        self._snapshot, self.layout = None, self._nothing  # the memory of the last one first
        where, kernels = self.options.snapshot_device, self.options.kernels
        place = None if where is None else torch.device(where)
        snapshot = snapshot_of(layout.sent, layout.readers, device=place, kernels=kernels)
        self._snapshot, self.layout, self.snapshot_bytes = snapshot, layout, snapshot.num_bytes
        self.stream = own_stream(snapshot.device, self.stream)

    def refresh_source(self) -> None:
        self._is_looked_up = False  # if this fails
        if self.layout.specs:
            self.layout.refresh()
            self._is_looked_up = True

    def delta(self, base_version: int) -> Plan:
        layout, snapshot, held = self.layout, self.snapshot, self.options.max_inflight_bytes
        compare = partial(
            snapshot.compare,
            bucket_bytes=self._bucket_bytes(snapshot),
            max_held_bytes=max(snapshot.num_bytes // 20, 1 << 20) if held is None else held,
            base_version=base_version,
        )
        is_known = self._is_looked_up
        rest = None if is_known or snapshot.device is None else layout.glance()
        if not is_known and rest is None:
            layout.refresh()
        readers = layout.readers
        delta = compare(readers, meanwhile=None if rest is None else partial(layout.refresh, rest))
        if layout.readers is not readers:
            delta = compare(layout.readers)
        self._is_looked_up = self._on_source_read is not None  # if this is tried again
        return delta

    def counts_by(self, delta: Plan) -> Ints:
        """int64[parameters]: elements of each parameter of the layout that differ here."""
        counts = np.zeros(len(self.layout.specs), np.int64)
        np.add.at(counts, [share.number for share in self.layout.sent], delta.counts)
        return counts

    def masters(self, numbers: Collection[int]) -> Masters:
        layout, found = self.layout, Masters()
        trained = {entry.name for entry in layout.tensors if entry.tensor.requires_grad}
        for share, reader in zip(layout.sent, layout.readers, strict=True):
            flat, is_asked = reader.flat, share.number in numbers and share.spec.name in trained
            if not is_asked or flat is None:
                continue
            if flat.dtype.is_floating and flat.dtype.item_size >= 4:
                own = found.setdefault(share.number, ())
                if flat.dtype != reader.dtype:
                    line = flat.line
                    found[share.number] = *own, int(line.sum(dtype=line.dtype))  # without a copy
        return found


class SourceLayout(SentLayout):
    """The same, and the live source of those that are sent from here.

    Attributes:
        sent: What is compared and sent here: all of `specs`, or what a rank has of them.
        readers: The live source in that order; another list after storage was replaced.
        tensors: What the source has returned last.
    """

    def __init__(
        self,
        source: WeightSource,
        specs: Sequence[ParameterSpec],
        tensors: list[NamedTensor],
        boxes: Mapping[str, ShardSpec] | None = None,
    ) -> None:
        """Look up where everything is.

        Args:
            source: Where the parameters are.
            specs: The layout.
            tensors: What the source has returned just now; ranks have agreed on their `maxima_of`.
            boxes: What to send, by canonical name; None for everything.
        """
        super().__init__(specs)
        self._source, self._boxes = source, boxes
        self._numbers = {spec.name: number for number, spec in enumerate(self.specs)}
        self.tensors: list[NamedTensor] = []
        self.readers: list[Reader] = []
        self._names = list(map(_NAMES, tensors))
        self.sent = self._shares(tensors)
        self.read(tensors)
        for entry in tensors:
            if entry.computed is not None:
                entry.computed.check()

    def glance(self) -> Callable[[], bool] | None:
        """What completes the look that this begins, if `readers` may be used before that.

        Not so if the source can only look as a whole. Readers keep what they read alive, so that
        a tensor whose address is the same is read where it was. `refresh` finds the rest.
        """
        look = getattr(self._source, "glance", None)
        return None if look is None else look(self.tensors)

    def refresh(self, rest: Callable[[], bool] | None = None) -> None:
        """Look at the source again, or complete the look that `glance` has begun.

        `readers` is another list then if anything has moved. Raises SourceChanged if it is not the
        same model any more.
        """
        if rest is None or not rest():
            tensors = self._source.tensors()
            if tensors is not self.tensors and list(map(_NAMES, tensors)) != self._names:
                raise SourceChanged(
                    "parameters or ties appeared or vanished; make a new WeightSender"
                )
            self.read(tensors)

    def _shares(self, tensors: list[NamedTensor]) -> tuple[Share, ...]:
        """What is sent of them. Raises ConfigError for parts, if everything is to be sent."""
        if self._boxes is not None:
            return tuple(
                Share(number, self.specs[number], region)
                for number in (self._numbers[entry.name] for entry in self._in_order(tensors))
                for _, region in rows_of(self._boxes[self.specs[number].name])
            )
        for entry in tensors:
            if entry.shard is None and not is_sharded(entry.tensor):
                continue
            box = held_of(entry)[0]
            if box.numel < prod(box.shape):
                raise ConfigError(
                    f"this rank holds {box.numel} of {prod(box.shape)} elements of {entry.name!r}: "
                    "give the senders of all ranks a `group`; for a store, gather it whole"
                )
        return whole(self.specs)

    def _in_order(self, tensors: list[NamedTensor]) -> list[NamedTensor]:
        """Those of which something is sent here, as they are numbered."""
        boxes = self._boxes
        if boxes is None:
            return tensors
        here = [entry for entry in tensors if entry.name in boxes]
        return sorted(here, key=lambda entry: self._numbers[entry.name])

    def read(self, tensors: list[NamedTensor]) -> None:
        """Have `readers` of what the source has returned last. Raises SourceChanged."""
        if tensors is not self.tensors:
            entries = self._in_order(tensors)
            self.readers = [reader for entry in entries for reader in self._readers_of(entry)]
            self.tensors = tensors

    def _readers_of(self, entry: NamedTensor) -> list[Reader]:
        spec = self.specs[self._numbers[entry.name]]
        if entry.shape != spec.shape:
            raise SourceChanged(
                f"{spec.name}: shape {spec.shape} became {entry.shape}; make a new WeightSender"
            )
        if self._boxes is None:
            if entry.computed is not None:
                return entry.computed.sent(spec)
            return [WireReader.of(local_of(entry.tensor), spec.dtype, name=spec.name)]
        (held, local), box = held_of(entry), self._boxes[entry.name]
        if held.shape != box.shape or overlap(held, box) != box:
            raise SourceChanged(
                f"{spec.name}: its sharding has changed; make new senders on all ranks"
            )
        if entry.computed is not None:
            return entry.computed.sent(spec, (held, box))
        local = narrowed(local, held, box)
        return [
            WireReader.of(local[index], spec.dtype, name=spec.name) for index, _ in rows_of(box)
        ]


class _Kept:
    """A source without what the options leave out."""

    def __init__(self, source: WeightSource, options: SenderOptions) -> None:
        self._source, self._options = source, options
        self.module = getattr(source, "module", None)
        self._all: list[NamedTensor] | None = None
        self._tensors: list[NamedTensor] = []

    def tensors(self) -> list[NamedTensor]:
        tensors = self._source.tensors()
        if tensors is not self._all:
            names = [[n for n in t.names if not leaves_out(self._options, n)] for t in tensors]
            self._tensors = [
                replace(tensor, names=tuple(kept))
                for tensor, kept in zip(tensors, names, strict=True)
                if kept
            ]
            self._all = tensors
        return self._tensors

    def glance(self, last: list[NamedTensor]) -> Callable[[], bool] | None:
        look = getattr(self._source, "glance", None)
        is_last = self._all is not None and last is self._tensors
        return look(self._all) if look is not None and is_last else None
