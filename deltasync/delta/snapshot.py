"""The sending half: a copy of a source as receivers hold it, and what brings them to another.

What compares and packs is a detector: `delta.detector` has one for hosts, `delta.device` for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.changes import Changes
from deltasync.delta.choice import Kernels, device_for
from deltasync.delta.detector import HostDetector, SourceMoved, arena, whole_sizes
from deltasync.delta.ledger import Ledger
from deltasync.delta.readers import Reader
from deltasync.delta.shard import Share
from deltasync.delta.tiles import Ints, Section, Space
from deltasync.errors import SourceChanged
from deltasync.wire.changes import ALIGNMENT, TILE, Sizes

MIN_BUCKET_BYTES = 256
"""What a small tile takes; a payload has one tile at least, whatever that takes."""

_TILE_BYTES, _PLACE_BYTES, _PADDING = 6, 2, 4 * ALIGNMENT  # of a payload
_MOST_TILES = 1024  # in a group: the unit in which changes are counted and distributed over buckets


class Digests(Protocol):
    """The digests of a version, wherever they are kept."""

    @property
    def total(self) -> int:
        """Of the whole model."""
        ...

    def digest_of(self, copies: NDArray[np.uint64] | None) -> int:
        """Of uint64[parameters] copies of each parameter together; None for one of each."""
        ...


class Found(Protocol):
    """Where some tiles of a source differ: see `delta.detector.HostFound`."""

    @property
    def section(self) -> Section: ...

    @property
    def ends(self) -> Ints: ...

    @property
    def counts(self) -> Ints: ...

    def emit(self, low: int, high: int, payload: Tensor, sums: Tensor) -> Changes: ...

    def overwrite(
        self, low: int, high: int, payload: Tensor, sums: Tensor, packed: Callable[[], None]
    ) -> None: ...


class Detector(Protocol):
    """A copy of a source, and how the source differs from it: see `delta.detector.HostDetector`."""

    space: Space
    num_bytes: int

    @property
    def ahead(self) -> NDArray[np.bool_] | Tensor: ...

    @property
    def device(self) -> torch.device | None: ...

    @property
    def before(self) -> HostDetector | None:
        """What codecs ask for the bits before; None if payloads are not coded here."""
        ...

    def take(self, readers: Sequence[Reader]) -> None: ...

    def capture(self) -> None: ...

    def find(
        self, groups: Sequence[int], room: int, meanwhile: Callable[[], None]
    ) -> Sequence[Found]: ...

    def advance(self, changes: Changes) -> None: ...

    def full(self, tiles: Ints, payload: Tensor) -> None: ...

    def measure(self, chunks: Ints) -> NDArray[np.uint64]: ...

    def read(self, share: int, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One payload, before it is packed.

    Attributes:
        sizes: What it has.
        device: Where it is packed.
        pack: Writes it to uint8[sizes.num_bytes]. Calls what is given when it stands there; if
            there is `old`, before anything of what it changes is overwritten.
        old: Has the bits that it changes. Ask after it was packed, before that is called. None if
            there are none, or none on a host.
    """

    sizes: Sizes
    device: torch.device
    pack: Callable[[Tensor, Callable[[], None]], None]
    old: HostDetector | None = None


class Plan(Protocol):
    """What a round needs to know of what it sends.

    Attributes:
        base_version: The version that it fits on, or None when it fits on any.
        payload_bytes, places: Of all payloads together.
        space: What they are of.
    """

    base_version: int | None
    payload_bytes: int
    places: int
    space: Space

    @property
    def ledger(self) -> Digests:
        """The digests that receivers arrive at. Asked for when everything is packed."""
        ...

    def buckets(self) -> Iterator[Bucket]:
        """The payloads, in order; each is packed before the next is asked for."""
        ...

    def decided(self) -> None:
        """The version is final: advance the snapshot."""
        ...


class Delta(Plan, Protocol):
    """A plan made by comparing.

    Attributes:
        held_bytes: Memory for what is kept until the decision.
    """

    held_bytes: int

    @property
    def nnz(self) -> int:
        """Elements that differ."""
        ...

    @property
    def counts(self) -> Ints:
        """int64[shares]: elements of each that differ, as they were given."""
        ...


class Snapshot:
    """A copy of a source as receivers hold it.

    A sync reads it, the decision writes it. To bound memory, packing may overwrite tiles early.
    These are *ahead*: if the sync is aborted, all of each is sent the next time.

    Args:
        detector: Has the copy. Owned.
        ledger: The digests of it, if they are known.

    Attributes:
        space: The tiles.
        ledger: The digests of the version that receivers hold.
        num_bytes: Of the copy.
        bucket_bytes: The largest payload, unless the options say otherwise.
    """

    def __init__(self, detector: Detector, ledger: Ledger | None = None) -> None:
        self.space, self._detector, self.num_bytes = detector.space, detector, detector.num_bytes
        is_on_gpu = detector.device is not None and detector.device.type == "cuda"
        self.bucket_bytes = (256 if is_on_gpu else 64) << 20
        self.ledger = Ledger(self.space) if ledger is None else ledger
        self._sums = self._there(self.ledger)  # of the bits that the copy has
        self._is_overwriting = False
        self._place = np.argsort(self.space.order)  # of a share among those of the space

    @property
    def device(self) -> torch.device | None:
        """Where kernels work on all of it together; None if there is no such device."""
        return self._detector.device

    def capture(self, readers: Sequence[Reader]) -> None:
        """Take the source's bits as they are now, all of them."""
        self._detector.take(readers)
        self._detector.capture()
        self.measure_again()

    def measure_again(self) -> None:
        """Take what the copy has for what receivers hold."""
        self.ledger = Ledger(self.space)
        self.ledger.sums[:] = self.measure(np.arange(self.space.num_chunks))
        self._sums, self._is_overwriting = self._there(self.ledger), False

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: the digests of int64[n] chunks of the ledger, read from memory."""
        return self._detector.measure(chunks)

    def read(self, number: int, start: int, stop: int) -> Tensor:
        """int[stop - start]: the bits of the copy of a run of a share; read only.

        Args: the number of the share in the order in which they were given.
        """
        return self._detector.read(int(self._place[number]), start, stop)

    def compare(
        self,
        readers: Sequence[Reader],
        *,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> DeltaPlan:
        """How a source differs from the copy.

        Args:
            readers: The source, in layout order. It must not change until its elements are packed.
            bucket_bytes: Largest payload.
            max_held_bytes: Of payloads, kept until the decision. Beyond that, packing overwrites
                the copy.
            base_version: What the copy holds.
            meanwhile: Called before the outcome is known, while kernels run. What it raises is
                raised.
        """
        groups = [tiles_of_group(bucket_bytes, one.item_size) for one in self.space.sections]
        self._detector.take(readers)
        return DeltaPlan(
            self,
            self._detector,
            self._detector.find(groups, max_held_bytes, meanwhile or (lambda: None)),
            self.settled().clone(),
            bucket_bytes=bucket_bytes,
            max_held_bytes=max_held_bytes,
            base_version=base_version,
        )

    def full(self, *, bucket_bytes: int) -> FullPlan:
        """All of the copy, in payloads of at most so many bytes."""
        return FullPlan(self._detector, self.ledger, bucket_bytes=bucket_bytes)

    @contextmanager
    def overwriting(self) -> Iterator[Tensor]:
        """What is done inside writes to the copy, and to int64[chunks] digests of the bits there.

        If it is broken off, `settled` measures what was written.
        """
        self._is_overwriting = True
        yield self._sums
        self._is_overwriting = False

    def settled(self) -> Tensor:
        """int64[chunks]: digests of the bits that the copy has, whatever broke off."""
        if self._is_overwriting:
            ahead = np.flatnonzero(torch.as_tensor(self._detector.ahead, device="cpu").numpy())
            chunks, ledger = np.unique(self.space.chunk[ahead]).astype(np.int64), self.ledger.copy()
            ledger.sums[chunks] = self.measure(chunks)
            self._sums, self._is_overwriting = self._there(ledger), False
        return self._sums

    def decided(self, kept: Sequence[Changes], ledger: Ledger, sums: Tensor) -> None:
        """Write these. The copy then is what receivers hold. Broken off, it may be called again.

        The digests, and int64[chunks] of the same where the detector adds to them, are owned.
        """
        with self.overwriting():
            for changes in kept:
                self._detector.advance(changes)
            self.ledger, self._sums = ledger, sums
            self._detector.ahead[:] = False

    def _there(self, ledger: Ledger) -> Tensor:
        """int64[chunks]: its sums, in memory of their own, where the detector adds to them."""
        sums = torch.from_numpy(ledger.sums.view(np.int64))
        return sums.to(self._detector.device or "cpu", copy=True)


def snapshot_of(
    shares: Sequence[Share],
    readers: Sequence[Reader],
    *,
    device: torch.device | None = None,
    kernels: Kernels = "auto",
) -> Snapshot:
    """A copy of a source as it is now: what the next delta is taken against.

    Args:
        shares: What there is to send; `shard.whole` makes it of a layout.
        readers: The source of these, in that order.
        device: Where to keep the copy; None for where the source is.
        kernels: What compares.
    """
    snapshot = Snapshot(_detector_for(Space(shares), readers, device, kernels))
    snapshot.capture(readers)
    return snapshot


def _detector_for(
    space: Space, readers: Sequence[Reader], place: torch.device | None, kernels: Kernels
) -> Detector:
    """What compares these with a copy at `place`."""
    devices = {reader.device for reader in readers}
    if place is not None and place.type != "cpu":  # kernels reach host memory that is pinned
        devices.add(place)
    device = device_for(devices, int(space.share_numel.sum()), kernels)
    if device is None:
        return HostDetector(space)
    from deltasync.delta.device import DeviceDetector

    is_apart = place is not None and place.type != device.type
    return DeviceDetector(space, device, arena(space, place or device, pinned=is_apart))


class DeltaPlan:
    """The changes since the snapshot.

    Attributes:
        nnz: Elements that differ.
        base_version, payload_bytes, places, held_bytes: As of `Delta`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        detector: Detector,
        found: Sequence[Found],
        sums: Tensor,
        *,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
    ) -> None:
        self._snapshot, self._detector, self._found, self._sums = snapshot, detector, found, sums
        self._ledger: Ledger | None = None
        self.space = snapshot.space
        self._kept: list[Changes] = []
        self.base_version: int | None = base_version
        self._buckets = [
            (one, low, high, _sizes(one, low, high))
            for one in found
            for low, high in _distributed(one, bucket_bytes)
        ]
        self.payload_bytes = self.held_bytes = self.places = 0
        self._num_held = 0
        # Where the copy is ahead, its bits are not those that receivers have. Only hosts code.
        is_ahead = snapshot.device is None and bool(detector.ahead.any())
        self._old = None if is_ahead else detector.before
        for _, _, _, sizes in self._buckets:
            self.payload_bytes += sizes.num_bytes
            self.places += sizes.places
            if self.payload_bytes <= max_held_bytes:
                self.held_bytes, self._num_held = self.payload_bytes, self._num_held + 1

    @property
    def ledger(self) -> Ledger:
        """Digests of what was packed."""
        if self._ledger is None:
            self._ledger = ledger_of(self.space, self._sums)
        return self._ledger

    @property
    def nnz(self) -> int:
        return int(self.counts.sum())

    def buckets(self) -> Iterator[Bucket]:
        """The payloads."""
        device = self._snapshot.device or torch.device("cpu")
        for number, (found, low, high, sizes) in enumerate(self._buckets):
            is_held = number < self._num_held
            pack = partial(self._pack, found, low, high, is_held)
            yield Bucket(sizes, device, pack, self._old)
        # The device tells now, while receivers stage: nobody waits for it later.
        _ = self.ledger, self.counts

    def decided(self) -> None:
        """Advance the snapshot by what was held."""
        self._snapshot.decided(self._kept, self.ledger, self._sums)
        self._kept.clear()

    @cached_property
    def counts(self) -> Ints:
        space = self.space
        counts = np.zeros(len(space.shares), np.int64)
        for one in self._found:
            counts[space.order] += one.counts
        return counts

    def _pack(
        self,
        found: Found,
        low: int,
        high: int,
        is_held: bool,
        payload: Tensor,
        packed: Callable[[], None],
    ) -> None:
        before, sums = self._sums, self._sums.clone()
        try:
            if is_held:
                changes = found.emit(low, high, payload, sums)
                packed()
                self._kept.append(Changes.of(changes.memory.clone(), changes.sizes))
            else:
                with self._snapshot.overwriting() as digests:
                    found.overwrite(low, high, payload, sums, packed)
                    digests += sums - before
        except SourceMoved:
            raise SourceChanged(
                "the source was written while it was sent: let nothing step or load until "
                "send_weights returns, or has called on_source_read"
            ) from None
        self._sums, self._ledger = sums, None


class FullPlan:
    """The whole snapshot: for receivers whose weights are not known."""

    base_version: int | None = None
    places = 0

    def __init__(self, detector: Detector, ledger: Ledger, *, bucket_bytes: int) -> None:
        self._detector, self.ledger = detector, ledger
        space = self.space = detector.space
        self._buckets: list[tuple[int, int]] = []
        for section in space.sections:
            step = max(1, bucket_bytes // _tile_bytes(section.item_size))
            for low in range(section.first, section.stop, step):
                self._buckets.append((low, min(low + step, section.stop)))
        self.payload_bytes = sum(
            whole_sizes(space, np.arange(*bounds)).num_bytes for bounds in self._buckets
        )

    def buckets(self) -> Iterator[Bucket]:
        """Every tile, whole."""
        device = self._detector.device or torch.device("cpu")
        for low, high in self._buckets:
            sizes = whole_sizes(self.space, np.arange(low, high))
            yield Bucket(sizes, device, partial(self._pack, low, high))

    def decided(self) -> None:
        """The snapshot is what was sent."""

    def _pack(self, low: int, high: int, payload: Tensor, packed: Callable[[], None]) -> None:
        self._detector.full(np.arange(low, high), payload)
        packed()


def ledger_of(space: Space, sums: Tensor) -> Ledger:
    """With int64[chunks] sums, in memory of its own."""
    ledger = Ledger(space)
    ledger.sums[:] = sums.cpu().numpy().view(np.uint64)
    return ledger


def _tile_bytes(item_size: int) -> int:
    """The most that one tile takes of a payload."""
    return TILE * item_size + 4 * ALIGNMENT


def tiles_of_group(bucket_bytes: int, item_size: int) -> int:
    """So many that they fit into a payload, whatever changes of them."""
    return max(1, min(_MOST_TILES, bucket_bytes // _tile_bytes(item_size)))


def _sizes(found: Found, low: int, high: int) -> Sizes:
    """Of the changes in groups [low, high)."""
    return Sizes(found.section.item_size, *(int(n) for n in found.ends[high] - found.ends[low]))


def _distributed(found: Found, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """[low, high): groups that go into one payload, which has some tiles."""
    size, ends = found.section.item_size, found.ends
    weights = np.array([_TILE_BYTES, _PLACE_BYTES + size, size])
    total = ends @ weights  # bytes before each group, but for the padding of columns
    room, low, last = max(0, bucket_bytes - _PADDING), 0, len(ends) - 1
    while low < last:
        high = max(low + 1, int(total.searchsorted(total[low] + room, "right")) - 1)
        if ends[high, 0] > ends[low, 0]:
            yield low, high
        low = high
