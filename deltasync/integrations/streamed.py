"""The weights of a trainer that gives them out one after another, each once a sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Flat, check_plain, dtype_of, torch_dtype
from deltasync.delta.changes import Changes
from deltasync.delta.detector import HostFound, HostSnapshot
from deltasync.delta.modes import in_plain_mode
from deltasync.delta.readers import WireReader, copy_read
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import (
    Bucket,
    Delta,
    Plan,
    distributed,
    tiles_of_group,
    whole_sizes,
)
from deltasync.delta.tiles import Ints, Space
from deltasync.errors import ConfigError, SourceChanged
from deltasync.sync.options import SenderOptions, leaves_out
from deltasync.sync.source.layout import SentLayout, specs_of, with_elements
from deltasync.sync.source.weights import LocalWeights
from deltasync.wire.changes import Sizes
from deltasync.wire.messages import ParameterSpec

_KEPT = 4  # a quarter of the model: about what 12 % of changes take
_STEP = 1 << 22  # elements converted at once

NamedWeights = Iterable[tuple[str, Tensor]]
"""(name, whole tensor), each of which may be gone when the next is asked for."""


class StreamedWeights(LocalWeights):
    """What a `WeightSender` sends of a trainer whose weights are gathered, tensor by tensor.

    Call `take` before each `send_weights`. It compares each tensor as it comes with the snapshot
    and keeps what has changed: beside the snapshot, up to a bound, and beyond it in the snapshot,
    so that there is no further copy of the model. Tiles that were written to the snapshot are sent
    whole, also after a sync that came to nothing.

    Args:
        options: `wire_dtypes` says what is sent in another dtype than it comes in.
            `max_inflight_bytes` bounds what is kept beside the snapshot; None for a quarter of the
            model.
            The snapshot is in host memory, and tensors are compared there.
        announced: What `take` will bring, in this order and in the dtypes that it comes in, if
            that is known: then engines can connect before the first `take`. Empty if it is not.
    """

    _snapshot: HostSnapshot | None

    def __init__(
        self, options: SenderOptions | None = None, *, announced: Sequence[ParameterSpec] = ()
    ) -> None:
        super().__init__(options or SenderOptions())
        self._announced = [s for s in announced if not leaves_out(self.options, s.name)]
        self._taken: list[ParameterSpec] = []  # what came first, in the dtypes that it came in
        self._flats: dict[int, Flat] = {}  # of the snapshot
        self._found: Delta | None = None

    @in_plain_mode
    def take(self, weights: NamedWeights) -> None:
        """Go through all weights as they are now. Also to the end if that raises.

        The first time says which there are, in any order; later ones bring the same.

        Raises:
            SourceChanged: A name or a shape is new, one is missing, or they are not as announced.
            ConfigError: A name came twice, or a tensor cannot be sent.
        """
        self._found = None
        rest = ((name, t) for name, t in weights if not leaves_out(self.options, name))
        try:
            if self._snapshot is None:
                self._fill(rest)
            else:
                self._compare(rest, self._snapshot)
        finally:
            for _ in rest:  # other ranks may take part in gathering them
                pass

    def declared(self, *, timeout_s: float = 60.0) -> tuple[ParameterSpec, ...]:
        known = self._taken or self._announced
        if not known:
            raise ConfigError("no weights were taken yet")
        return tuple(known)

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        """Start from what was taken last.

        The first time the snapshot is cast to the dtypes that receivers hold; both are in memory
        then. `wire_dtypes` avoids that.
        """
        before = self._specs
        specs = specs_of(self._taken, held, self.options.wire_dtypes)
        if specs != before != tuple(self._taken):
            raise ConfigError("receivers hold other dtypes than earlier ones: give `wire_dtypes`")
        if self._found is not None:
            self._found.decided()
        elif self._snapshot is not None and self._snapshot.ahead.any():
            raise ConfigError("the weights that were taken last are not complete: take them again")
        if specs != before:
            tensors = [flat.tensor for flat in self._flats.values()]
            self._begin(specs, dict(enumerate(map(self._copy, specs, tensors))))

    def delta(self, base_version: int) -> Plan:
        """What was taken last, also if it is asked for again."""
        if self._found is None or self._found.is_decided:
            raise ConfigError("there are no new weights: take them before each send_weights")
        self._found.base_version = base_version
        return self._found

    @property
    def _specs(self) -> tuple[ParameterSpec, ...]:
        """What the snapshot holds."""
        return tuple(share.spec for share in self.snapshot.space.given)

    def _fill(self, weights: NamedWeights) -> None:
        """Make the snapshot."""
        taken: dict[str, ParameterSpec] = {}
        specs: list[ParameterSpec] = []
        flats: dict[int, Flat] = {}
        for name, tensor in weights:
            if name in taken:
                raise ConfigError(f"{name!r} came twice")
            check_plain(tensor, name)
            taken[name] = ParameterSpec((name,), tuple(tensor.shape), dtype_of(tensor, name=name))
            specs += specs_of([taken[name]], (), self.options.wire_dtypes)
            flats[len(flats)] = self._copy(specs[-1], tensor)
        with_elements(tuple(specs))
        if self._announced:
            self._check_announced(list(taken.values()))
        self._begin(specs, flats)
        self._taken = list(taken.values())

    def _begin(self, specs: Sequence[ParameterSpec], flats: dict[int, Flat]) -> None:
        """Take these as the snapshot."""
        layout = SentLayout(specs)
        space = Space(whole(layout.specs))
        snapshot = HostSnapshot(space, [flats[n].line for n in space.order.tolist()])
        snapshot.measure_again()
        self._snapshot, self.layout, self._flats = snapshot, layout, flats
        self.snapshot_bytes = snapshot.num_bytes

    def _check_announced(self, taken: Sequence[ParameterSpec]) -> None:
        """Raises SourceChanged, by the first name, if something else was announced."""
        for came, announced in zip_longest(taken, self._announced):
            if came != announced:
                raise SourceChanged(f"{_words(announced)} was announced, and {_words(came)} came")

    def _copy(self, spec: ParameterSpec, tensor: Tensor) -> Flat:
        memory = torch.empty(
            spec.shape, dtype=torch_dtype(spec.dtype), device="cpu", pin_memory=tensor.is_cuda
        )
        copy = Flat.of(memory)
        copy_read(_reader(spec, tensor), copy, step=_STEP)
        return copy

    def _compare(self, weights: NamedWeights, snapshot: HostSnapshot) -> None:
        """Find what has changed."""
        specs = [share.spec for share in snapshot.space.given]
        missing = {spec.name: number for number, spec in enumerate(specs)}
        bucket_bytes, limit = self._bucket_bytes(snapshot), self.options.max_inflight_bytes
        room = snapshot.num_bytes // _KEPT if limit is None else limit
        found = _Taken(snapshot, bucket_bytes=bucket_bytes, room=room)
        for name, tensor in weights:
            number = missing.pop(name, None)
            if number is None:
                raise SourceChanged(f"{name!r} is new, or came twice")
            found.add(number, _reader(specs[number], tensor))
        if missing:
            raise SourceChanged(f"{len(missing)} tensors did not come, {min(missing)!r} for one")
        self._found = found.complete()


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """What changes of some tiles that follow each other.

    Attributes:
        sizes: What the changes take of a payload.
        changes: They themselves; None if the snapshot has them.
        tiles: int64[T]: which change; all of each goes if the snapshot has them.
    """

    sizes: Sizes
    changes: Changes | None
    tiles: Ints


class _Taken:
    """What is found while weights pass by.

    Args:
        snapshot: What they are compared with.
        bucket_bytes: The largest payload.
        room: Bytes of changes that are kept. Others are written to the snapshot.
    """

    def __init__(self, snapshot: HostSnapshot, *, bucket_bytes: int, room: int) -> None:
        self._snapshot, self._space = snapshot, snapshot.space
        self._bucket_bytes, self._room, self._held_bytes = bucket_bytes, room, 0
        self._place = np.argsort(self._space.order).tolist()
        self._sums = snapshot.settled()  # of the copy, with what is kept
        self._groups: list[_Group] = []
        self._counts = np.zeros(len(self._space.shares), np.int64)

    def add(self, number: int, reader: WireReader) -> None:
        """Compare a tensor, which may be gone when this returns."""
        share = self._place[number]
        section = self._space.section_of(int(self._space.item_size[share]))
        assert section is not None
        self._snapshot.take_one(share, reader)
        step = tiles_of_group(self._bucket_bytes, section.item_size)
        first, stop = self._space.first[share : share + 2].tolist()
        for low in range(first, stop, step):
            found = HostFound(self._snapshot, section)
            found.add(low, min(low + step, stop), self._bucket_bytes)
            self._counts[share] += found.counts[share]
            if found.ends[-1, 0]:
                self._keep(found)

    def _keep(self, found: HostFound) -> None:
        """Keep what changes, or write it to the snapshot."""
        sizes = Sizes(found.section.item_size, *found.ends[-1].tolist())
        payload = torch.empty(sizes.num_bytes, dtype=torch.uint8, device="cpu")
        is_kept = sizes.num_bytes <= self._room
        self._snapshot.is_ahead |= not is_kept
        changes = found.emit(0, 1, payload, self._sums, lambda: None, not is_kept)
        tiles, _ = changes.table()
        if is_kept:
            self._room -= sizes.num_bytes
            self._held_bytes += sizes.num_bytes
            self._groups.append(_Group(sizes, changes, tiles))
            return
        sizes = whole_sizes(self._space, tiles)
        self._groups.append(_Group(sizes, None, tiles))

    def complete(self) -> Delta:
        """All tensors were added."""
        self._groups.sort(key=lambda group: int(group.tiles[0]))
        counts: Ints = self._counts[self._place]
        return Delta(
            self._snapshot,
            [
                Bucket(sizes, torch.device("cpu"), partial(self._pack, sizes, groups))
                for sizes, groups in self._distributed()
            ],
            sums=self._sums,
            kept=[group.changes for group in self._groups if group.changes is not None],
            counts=lambda: counts,
            held_bytes=self._held_bytes,
            base_version=0,
        )

    def _distributed(self) -> Iterator[tuple[Sizes, list[_Group]]]:
        """Groups of one item size that go into one payload."""
        for size, some in groupby(self._groups, key=lambda group: group.sizes.item_size):
            groups = list(some)
            rows = [(one.sizes.tiles, one.sizes.places, one.sizes.whole) for one in groups]
            ends = np.cumsum([(0, 0, 0), *rows], axis=0)
            for low, high in distributed(ends, size, self._bucket_bytes):
                yield Sizes(size, *(ends[high] - ends[low]).tolist()), groups[low:high]

    def _pack(
        self, sizes: Sizes, groups: list[_Group], payload: Tensor, packed: Callable[[], None]
    ) -> None:
        parts = [
            self._snapshot.whole_of(group.tiles) if group.changes is None else group.changes
            for group in groups
        ]
        Changes.of(payload, sizes).join(parts)
        packed()


def _reader(spec: ParameterSpec, tensor: Tensor) -> WireReader:
    """Raises SourceChanged for another shape, ConfigError for a dtype that cannot be sent."""
    if tuple(tensor.shape) != spec.shape:
        raise SourceChanged(f"{spec.name}: shape {spec.shape} became {tuple(tensor.shape)}")
    return WireReader.of(tensor.detach().contiguous(), spec.dtype, name=spec.name)


def _words(spec: ParameterSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.name}: {spec.dtype.name}{list(spec.shape)}"
