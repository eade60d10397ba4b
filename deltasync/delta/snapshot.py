"""The sending half: a copy of a source as receivers hold it, and what brings them to another.

`delta.detector` has what compares and packs on hosts, `delta.device` what does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import INTEGERS, Flat
from deltasync.delta.changes import Changes
from deltasync.delta.host import padded_numel
from deltasync.delta.ledger import Ledger
from deltasync.delta.readers import Reader, copy_read
from deltasync.delta.tiles import CHUNK, Ints, Space
from deltasync.wire.changes import ALIGNMENT, TILE, Sizes

if TYPE_CHECKING:  # which imports this, and Triton
    from deltasync.delta.detector import HostFound, HostSnapshot
    from deltasync.delta.device import DeviceFound

Packed: TypeAlias = Callable[[], None]
"""Called when a payload stands where it is packed."""

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
    pack: Callable[[Tensor, Packed], None]
    old: HostSnapshot | None = None


class Plan:
    """What a round sends.

    Args:
        space: What the payloads are of.
        buckets: The payloads, in order; each is packed before the next is asked for.
        ledger: The digests that receivers arrive at, unless a subclass knows them later.
        base_version: The version that it fits on, or None when it fits on any.

    Attributes:
        space, base_version: The same.
        payload_bytes, places: Of all payloads together.
        held_bytes: Memory for what is kept until the decision.
    """

    held_bytes = 0

    def __init__(
        self,
        space: Space,
        buckets: Iterable[Bucket],
        ledger: Digests | None = None,
        *,
        base_version: int | None = None,
    ) -> None:
        self.space, self.base_version = space, base_version
        self._buckets, self._ledger = list(buckets), ledger
        self.payload_bytes = sum(one.sizes.num_bytes for one in self._buckets)
        self.places = sum(one.sizes.places for one in self._buckets)

    @property
    def ledger(self) -> Digests:
        """The digests that receivers arrive at. Asked for when everything is packed."""
        assert self._ledger is not None
        return self._ledger

    @property
    def nnz(self) -> int:
        """Elements that differ, if that is known."""
        return int(self.counts.sum())

    @cached_property
    def counts(self) -> Ints:
        """int64[shares]: elements of each that differ, as they were given; 0 if nobody compared."""
        return np.zeros(len(self.space.shares), np.int64)

    def buckets(self) -> Iterator[Bucket]:
        """The payloads, in order."""
        yield from self._buckets

    def decided(self) -> None:
        """The version is final: advance the snapshot, if it is not what was sent."""


class Delta(Plan):
    """The changes since a snapshot.

    Args:
        snapshot: The same.
        buckets: The payloads. One that could not be packed makes the rest of no use.
        sums: int64[chunks]: digests of what receivers hold with all that is packed. Not owned.
        kept: What the copy has to take over at the decision. Not owned.
        counts: Returns `Plan.counts`.
        held_bytes, base_version: As of `Plan`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        buckets: Iterable[Bucket],
        *,
        sums: Tensor,
        kept: list[Changes],
        counts: Callable[[], Ints],
        held_bytes: int,
        base_version: int,
    ) -> None:
        super().__init__(snapshot.space, buckets, base_version=base_version)
        self._snapshot, self._sums, self._kept, self._count = snapshot, sums, kept, counts
        self.held_bytes, self.is_decided = held_bytes, False

    @cached_property
    def ledger(self) -> Ledger:
        """Digests of what was packed."""
        return Ledger(self.space, self._sums.cpu().numpy().view(np.uint64))

    @cached_property
    def counts(self) -> Ints:
        return self._count()

    def buckets(self) -> Iterator[Bucket]:
        """The payloads. The device tells the rest at their end, while receivers stage: nobody waits
        for it later.
        """
        yield from self._buckets
        _ = self.ledger, self.counts

    def decided(self) -> None:
        """Advance the snapshot by what was kept."""
        self._snapshot.decided(self._kept, self.ledger, self._sums)
        self.is_decided = True
        self._kept.clear()  # their memory
        self._buckets.clear()


class Snapshot:
    """A copy of a source as receivers hold it.

    A sync reads it, the decision writes it. To bound memory, packing may overwrite tiles early.
    These are *ahead*: if the sync is aborted, all of each is sent the next time.

    Args:
        space: The tiles.
        lines: int[numel] of each share: where the copy is.
        device: Where kernels work on all of it together; None if there is no such device.

    Attributes:
        space, lines, device: The same.
        ledger: The digests of the version that receivers hold.
        ahead: bool[tiles]: which have other bits here than that version.
        is_ahead: Whether some may be.
        num_bytes: Of the copy.
        bucket_bytes: The largest payload, unless the options say otherwise.
    """

    ahead: NDArray[np.bool_] | Tensor
    _step: ClassVar[int] = CHUNK  # elements that are copied at once

    def __init__(
        self, space: Space, lines: Sequence[Tensor], device: torch.device | None = None
    ) -> None:
        self.space, self.lines, self.device, self.is_ahead = space, lines, device, False
        self.num_bytes = int((space.share_numel * space.item_size).sum())
        is_on_gpu = device is not None and device.type == "cuda"
        self.bucket_bytes = (256 if is_on_gpu else 64) << 20
        self.ledger = Ledger(space)
        self._sums = self._there(self.ledger.sums)  # of it
        self._place = np.argsort(space.order)  # of a share among those of the space
        self._taken: Sequence[Reader] = ()
        self._readers: Mapping[int, Reader] = {}  # by share

    def take(self, readers: Sequence[Reader]) -> None:
        """Read from these from now on: one for each share, in the order in which they were given.

        Nothing is looked up again if it is the same list as before.
        """
        if readers is not self._taken:
            order = self.space.order.tolist()
            self._taken, self._readers = readers, {n: readers[one] for n, one in enumerate(order)}

    def capture(self, readers: Sequence[Reader]) -> None:
        """Take the source's bits as they are now, all of them."""
        self.take(readers)
        for share, line in enumerate(self.lines):
            copy_read(self._readers[share], Flat.of(line), step=self._step)
        self.measure_again()

    def measure_again(self) -> None:
        """Take what the copy has for what receivers hold."""
        self.ledger = Ledger(self.space, self.measure(np.arange(self.space.num_chunks)))
        self._sums = self._there(self.ledger.sums)
        self.ahead[:] = False
        self.is_ahead = False

    def read(self, number: int, start: int, stop: int) -> Tensor:
        """int[stop - start]: the bits of the copy of a run of a share; read only.

        Args: the number of the share in the order in which they were given.
        """
        return self.lines[int(self._place[number])][start:stop]

    def compare(
        self,
        readers: Sequence[Reader],
        *,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Delta:
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
        self.take(readers)
        found = self.find(groups, max_held_bytes, meanwhile or (lambda: None))
        sums, kept, buckets = self.settled(), list[Changes](), list[Bucket]()
        # Where the copy is ahead, its bits are not those that receivers have. Only hosts code.
        old, device = None if self.is_ahead else self.before, self.device or torch.device("cpu")
        payload_bytes = held_bytes = 0
        for one in found:
            for low, high in distributed(one.ends, one.section.item_size, bucket_bytes):
                sizes = _sizes(one, low, high)
                payload_bytes += sizes.num_bytes
                is_held = payload_bytes <= max_held_bytes
                held_bytes = payload_bytes if is_held else held_bytes
                pack = partial(self._pack, one, low, high, sums, kept if is_held else None)
                buckets.append(Bucket(sizes, device, pack, old))
        return Delta(
            self,
            buckets,
            sums=sums,
            kept=kept,
            counts=partial(_counts, self.space, found),
            held_bytes=held_bytes,
            base_version=base_version,
        )

    def full(self, *, bucket_bytes: int) -> Plan:
        """All of the copy, in payloads of at most so many bytes."""
        space, buckets = self.space, list[Bucket]()
        for section in space.sections:
            step = max(1, bucket_bytes // _tile_bytes(section.item_size))
            for low in range(section.first, section.stop, step):
                bounds = low, min(low + step, section.stop)
                sizes, pack = whole_sizes(space, np.arange(*bounds)), partial(self._full, *bounds)
                buckets.append(Bucket(sizes, self.device or torch.device("cpu"), pack))
        return Plan(space, buckets, self.ledger)

    def settled(self) -> Tensor:
        """int64[chunks]: digests of the bits that the copy has, in memory of their own.

        Those of chunks that are ahead are measured.
        """
        if not self.is_ahead:
            return self._sums.clone()
        ahead = np.flatnonzero(torch.as_tensor(self.ahead, device="cpu").numpy())
        chunks, sums = np.unique(self.space.chunk[ahead]).astype(np.int64), self.ledger.sums.copy()
        sums[chunks] = self.measure(chunks)
        return self._there(sums)

    def decided(self, kept: Sequence[Changes], ledger: Ledger, sums: Tensor) -> None:
        """Write these. The copy then is what receivers hold. Broken off, it may be called again.

        The digests, and int64[chunks] of the same where packing adds to them, are owned.
        """
        self.is_ahead = True
        for changes in kept:
            self.advance(changes)
        self.ledger, self._sums = ledger, sums
        self.ahead[:] = False
        self.is_ahead = False

    @property
    def before(self) -> HostSnapshot | None:
        """What codecs ask for the bits before; None if payloads are not coded here."""
        return None

    def find(
        self, groups: Sequence[int], room: int, meanwhile: Callable[[], None]
    ) -> Sequence[HostFound | DeviceFound]:
        """Compare all tiles.

        Args:
            groups: How many tiles of each section are one group.
            room: Bytes of payloads up to which changes are kept.
            meanwhile: Called before the outcome is known.
        """
        raise NotImplementedError

    def advance(self, changes: Changes) -> None:
        """Write changes to the copy, which is ahead then."""
        raise NotImplementedError

    def whole(self, tiles: Ints, payload: Tensor) -> None:
        """Write all of int64[T] tiles, of one section, to a payload of their sizes."""
        raise NotImplementedError

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: the digests of int64[n] chunks of the ledger, read from memory."""
        raise NotImplementedError

    def _pack(
        self,
        found: HostFound | DeviceFound,
        low: int,
        high: int,
        sums: Tensor,
        kept: list[Changes] | None,
        payload: Tensor,
        packed: Packed,
    ) -> None:
        """Pack the changes of groups [low, high), to keep them, or to write them to the copy.

        If that breaks off, the digests mean nothing.
        """
        if kept is None:
            self.is_ahead = True
        changes = found.emit(low, high, payload, sums, packed, kept is None)
        if kept is not None:
            kept.append(Changes.of(changes.memory.clone(), changes.sizes))

    def _full(self, low: int, high: int, payload: Tensor, packed: Packed) -> None:
        self.whole(np.arange(low, high), payload)
        packed()

    def _there(self, sums: NDArray[np.uint64]) -> Tensor:
        """int64[chunks]: sums of a ledger, in memory of their own, where packing adds to them."""
        return torch.from_numpy(sums.view(np.int64)).to(self.device or "cpu", copy=True)


def arena(space: Space, device: torch.device, *, pinned: bool = False) -> list[Tensor]:
    """int[numel] for each share, side by side."""
    sizes = space.share_numel * space.item_size
    spaces = -(-sizes // ALIGNMENT) * ALIGNMENT
    begins = np.cumsum(spaces) - spaces
    num_bytes = int(spaces.sum())
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    columns = begins.tolist(), sizes.tolist(), space.item_size.tolist()
    return [
        memory[begin : begin + length].view(INTEGERS[size])
        for begin, length, size in zip(*columns, strict=True)
    ]


def whole_sizes(space: Space, tiles: Ints) -> Sizes:
    """Of a payload with all of int64[T] tiles, of one section."""
    size = int(space.item_size[space.share[tiles[0]]])
    return Sizes(size, len(tiles), 0, int(padded_numel(space.numel[tiles], size).sum()))


def _counts(space: Space, found: Sequence[HostFound | DeviceFound]) -> Ints:
    """int64[shares]: elements that differ, as shares were given."""
    counts = np.zeros(len(space.shares), np.int64)
    for one in found:
        counts[space.order] += one.counts
    return counts


def _tile_bytes(item_size: int) -> int:
    """The most that one tile takes of a payload."""
    return TILE * item_size + 4 * ALIGNMENT


def tiles_of_group(bucket_bytes: int, item_size: int) -> int:
    """So many that they fit into a payload, whatever changes of them."""
    return max(1, min(_MOST_TILES, bucket_bytes // _tile_bytes(item_size)))


def _sizes(found: HostFound | DeviceFound, low: int, high: int) -> Sizes:
    """Of the changes in groups [low, high)."""
    return Sizes(found.section.item_size, *(int(n) for n in found.ends[high] - found.ends[low]))


def distributed(ends: Ints, size: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """[low, high): groups that go into one payload, which has some tiles.

    Args:
        ends: int64[groups + 1, 3]: tiles, places and whole elements of all groups before.
        size: Of an element.
        bucket_bytes: Largest payload, unless a group alone takes more.
    """
    weights = np.array([_TILE_BYTES, _PLACE_BYTES + size, size])
    total = ends @ weights  # bytes before each group, but for the padding of columns
    room, low, last = max(0, bucket_bytes - _PADDING), 0, len(ends) - 1
    while low < last:
        high = max(low + 1, int(total.searchsorted(total[low] + room, "right")) - 1)
        if ends[high, 0] > ends[low, 0]:
            yield low, high
        low = high
