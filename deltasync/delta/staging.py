"""The receiving half: changes checked and kept beside live weights, then written, or taken back.

Here is what hosts do: elements that lie in host memory in one run are worked on together; the rest
goes by parameter, through `Live`. `delta.live` has the same for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Flat, Live, are_equal
from deltasync.delta.changes import Changes
from deltasync.delta.choice import Kernels, device_for
from deltasync.delta.host import Bits, Table, account_run, chunks_of, digest_run
from deltasync.delta.kernels import host as kernels
from deltasync.delta.ledger import Ledger
from deltasync.delta.tiles import CHUNK, Ints, Space
from deltasync.errors import DigestMismatch, LimitExceeded, ProtocolViolation
from deltasync.wire.changes import PLACE_BYTES
from deltasync.wire.messages import ParameterSpec

if TYPE_CHECKING:  # which import Triton
    from deltasync.delta.launches import Tiles
    from deltasync.delta.live import DeviceChanges, DeviceTally

    Staged: TypeAlias = "Elements | DeviceChanges"
    Tally: TypeAlias = "HostTally | DeviceTally"

_POSITION_BYTES = 8


def staged_bytes_of(*, payload_bytes: int, places: int) -> int:
    """Memory that staging takes at most: what comes, the bits before it, and an address for each
    lane, which takes the room of its places.
    """
    return 2 * payload_bytes + (_POSITION_BYTES - 2 * PLACE_BYTES) * places


class LiveWeights:
    """Live weights, bound to the layout of a sender.

    Args:
        flats: Those that are held, by number in the layout. They must outlive this object.
        space: All of the layout, whole.
        kernels: What checks and writes.

    Attributes:
        flats, space: The same.
        share_of: int64[parameters]: the share of the space that each is.
        ledger: Digests of the version that they hold. The caller measures and replaces it.
        num_bytes: Of the weights.
        device: Where kernels work on all of them together; None if they do not.
    """

    def __init__(
        self, flats: Mapping[int, Live], space: Space, *, kernels: Kernels = "torch"
    ) -> None:
        self.flats, self.space, self.ledger = flats, space, Ledger(space)
        self.num_bytes = sum(flat.numel * flat.dtype.item_size for flat in flats.values())
        self.share_of = np.argsort(space.parameter)
        devices = {flat.line.device for flat in flats.values()}
        self.device = device_for(devices, self.num_bytes, kernels, flats.values())
        self._tiles: Tiles | None = None
        if self.device is not None:
            from deltasync.delta.live import tiles_of

            self._tiles = tiles_of(self, space, self.device)

    def lane(self, space: Space | None = None) -> Lane:
        """Where what a rank of a trainer sends is in them; None for all of the layout."""
        space = self.space if space is None else space
        if self._tiles is None:
            return Lane(self, space)
        from deltasync.delta.live import DeviceLane, tiles_of

        is_known = space is self.space
        tiles = self._tiles if is_known else tiles_of(self, space, self._tiles.device)
        return DeviceLane(self, tiles)

    def tally(self) -> Tally:
        """What a sync that begins now adds up."""
        if self._tiles is None:
            return HostTally(self.ledger)
        from deltasync.delta.live import DeviceTally

        return DeviceTally(self.ledger, self._tiles.device)

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """The layout."""
        return tuple(share.spec for share in self.space.given)

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: the digests of int64[n] chunks of the ledger, read from memory."""
        if self._tiles is not None:
            return self._tiles.measure(chunks)
        found = np.zeros(len(chunks), np.uint64)
        for n, chunk in enumerate(chunks.tolist()):
            share, start, stop = self.space.bounds(chunk)
            if (flat := self.flats.get(int(self.space.parameter[share]))) is None:
                continue
            held = flat.held(start, stop)
            if held is None:
                found[n] = digest_run(self.space, share, start, flat.read(start, stop))
            elif len(held):
                found[n] = self.digests_at(share, held, flat.gather(held))[1].sum()
        return found

    def digests_at(self, share: int, positions: Tensor, bits: Tensor) -> tuple[Ints, NDArray[Any]]:
        """(int64[k] chunks, uint64[k]): digests of int[n] bits at increasing int64[n] positions of
        a parameter.
        """
        where = positions.cpu().numpy()
        chunk = where // CHUNK
        cuts = np.concatenate(([0], np.flatnonzero(np.diff(chunk)) + 1, [len(where)]))
        keys = np.full(len(cuts) - 1, self.space.seeds[share])
        sums = kernels.digest_pieces(where, bits.cpu().numpy(), keys, cuts)
        return self.space.first_chunk[share] + chunk[cuts[:-1]], sums


@dataclass(frozen=True, eq=False)
class Received:
    """Changes that were checked, or are checked when they are staged.

    Attributes:
        lane: Where they belong.
        changes: Over memory that is not owned.
        is_private: Nobody else can write to it while it is staged.
    """

    lane: Lane
    changes: Changes
    is_private: bool = False

    @cached_property
    def table(self) -> Table:
        """Of them, on the host."""
        return Table(self.lane.space, self.changes)

    @property
    def parameters(self) -> Ints:
        """int64[n]: numbers of the layout's parameters that they speak of, increasing."""
        space = self.lane.space
        found: Ints = np.unique(space.parameter[self.table.share])
        return found


class Lane:
    """Where what a rank of a trainer sends is in the live weights.

    Args:
        live: The weights.
        space: What the rank sends.
    """

    def __init__(self, live: LiveWeights, space: Space) -> None:
        self._live, self.space, self._after = live, space, -1
        self._flats = [live.flats.get(share.number) for share in space.shares]
        shares = list(zip(space.shares, self._flats, strict=True))
        self._is_simple = np.array([_is_simple(flat) and not s.gap for s, flat in shares], np.bool_)
        starts = np.array([share.region.start for share in space.shares], np.int64)
        self._whole = live.share_of[space.parameter]
        self._elements = live.space.first_chunk[self._whole] * CHUNK + starts
        self._begins = np.zeros(len(shares), np.int64)
        for number in np.flatnonzero(self._is_simple).tolist():
            flat, share = self._flats[number], space.shares[number]
            assert flat is not None
            self._begins[number] = flat.line.data_ptr() + share.region.start * flat.line.itemsize

    def begin(self) -> None:
        """A new sync begins: any tile may come first."""
        self._after = -1

    def check(self, received: Received) -> None:
        """Raises InvalidIndices unless they are changes of this space that follow those before."""
        received.table.check(self._after)
        self._after = int(received.table.tiles[-1])

    def changes(self, received: Received, tally: Any, *, in_place: bool) -> Iterator[Staged]:
        """What changes that were checked write here. Their memory is copied.

        What it changes of digests is added to what a tally of these weights has, in place when it
        is committed at the latest.
        """
        changes, table, sums = received.changes, received.table, tally.ledger.sums
        if self._is_simple[table.share].all():
            yield from self._lanes(table, changes.values.cpu(), sums)
        else:
            positions = table.positions()
            for share, lanes in table.by_share():
                where = torch.from_numpy(positions[lanes])
                yield from self._scattered(share, where, changes.values[lanes], sums)
        for run in table.runs():
            yield from self._whole_run(run.share, run.start, changes.whole[run.there], sums)

    def old(self, changes: Changes) -> tuple[Bits, Bits]:
        """(unsigned[N], unsigned[W]): live bits at lanes and whole tiles of changes.

        Of what is not held they are 0. Raises InvalidIndices unless these are changes of this
        space.
        """
        table = Table(self.space, changes)
        table.check()
        size = table.sizes.item_size
        lanes, whole = (np.zeros(n, f"u{size}") for n in (table.sizes.places, table.sizes.whole))
        is_simple = self._is_simple[table.share]
        if is_simple.all():
            lanes = table.lanes(self._begins).read()
        else:
            where = torch.from_numpy(table.positions())
            for number, there in table.by_share():
                lanes[there] = self._read(number, where[there])
        for run in table.runs():
            for _, low, high in chunks_of(0, run.start, run.stop):
                there = slice(run.at + low - run.start, run.at + high - run.start)
                whole[there] = self._run(run.share, low, high)
        return lanes, whole

    def span(self, share: int, start: int, stop: int) -> Bits | None:
        """unsigned[stop - start]: live bits of a run of a share; None if they are not held.

        Raises ProtocolViolation if a part of them is.
        """
        flat, one = self._flats[share], self.space.shares[share]
        if flat is None:
            return None
        if one.gap or flat.held(one.region.start + start, one.region.start + stop) is not None:
            raise ProtocolViolation(
                f"{one.spec.name}: codec class needs all of it, and a part is held here; send with "
                "compression='gap'"
            )
        return self._run(share, start, stop)

    def _run(self, share: int, start: int, stop: int) -> Bits:
        """unsigned[stop - start]: live bits of a run of a share; 0 where they are not held."""
        flat, one = self._flats[share], self.space.shares[share]
        low, high = one.region.start + start, one.region.start + stop
        if flat is None or one.gap or flat.held(low, high) is not None:
            return self._read(share, torch.arange(start, stop, device="cpu"))
        found: Bits = kernels.unsigned(flat.read(low, high).cpu())
        return found

    def _read(self, share: int, where: Tensor) -> Bits:
        """unsigned[n]: live bits at int64[n] places of a share; 0 where they are not held."""
        flat = self._flats[share]
        found = np.zeros(len(where), f"u{self.space.item_size[share]}")
        if flat is not None:
            positions, kept = self._held(share, flat, where)
            bits = flat.gather(positions)
            found[... if kept is None else kept.cpu().numpy()] = kernels.unsigned(bits.cpu())
        return found

    def _lanes(self, table: Table, values: Tensor, sums: NDArray[np.uint64]) -> Iterator[Elements]:
        if not len(values):
            return
        where, new = table.lanes(self._begins), kernels.unsigned(values).copy()
        old = where.read()
        table.account(self._elements, sums, new, old)
        yield Elements(where.write_checked, new, old, where.num_bytes)

    def _scattered(
        self,
        share: int,
        where: Tensor,
        values: Tensor,
        sums: NDArray[np.uint64],
        again: Callable[[], Tensor] | None = None,
    ) -> Iterator[Elements]:
        """What is held of elements at int64[n] places of a share.

        Its positions are kept, unless there is what finds them `again`.
        """
        flat = self._flats[share]
        if flat is None:
            return
        positions, kept = self._held(share, flat, where)
        new = values.to(flat.line.device, copy=True)
        new = new if kept is None else new[kept]
        if not len(new):
            return
        old = flat.gather(positions)
        for bits, add in ((new, np.add), (old, np.subtract)):
            add.at(sums, *self._live.digests_at(int(self._whole[share]), positions, bits))
        num_bytes = positions.nbytes if again is None else 0
        put = partial(_put_scattered, flat, again or positions)
        yield Elements(put, new, old, num_bytes, self.space.shares[share].spec.name)

    def _held(self, share: int, flat: Live, where: Tensor) -> tuple[Tensor, Tensor | None]:
        """(int64[k], bool[n]): positions of those of int64[n] places of a share that are held, and
        which are; None for all.
        """
        positions = self.space.shares[share].region.places(where).to(flat.line.device)
        kept = flat.keeps(positions)
        return positions if kept is None else positions[kept], kept

    def _positions(self, share: int, flat: Live, low: int, high: int) -> Tensor:
        """int64[k]: positions of those of a run of a share that are held."""
        return self._held(share, flat, torch.arange(low, high, device="cpu"))[0]

    def _whole_run(
        self, share: int, start: int, bits: Tensor, sums: NDArray[np.uint64]
    ) -> Iterator[Elements]:
        """A run of a share. Positions of what is held of it are not kept: they would take more
        memory than the bits.
        """
        flat, one = self._flats[share], self.space.shares[share]
        if flat is None:
            return
        for _, low, high in chunks_of(self._elements[share], start, start + len(bits)):
            new, begin = bits[low - start : high - start], one.region.start + low
            if one.gap or flat.held(begin, begin + len(new)) is not None:
                where = torch.arange(low, high, device="cpu")
                again = partial(self._positions, share, flat, low, high)
                yield from self._scattered(share, where, new, sums, again)
                continue
            new = new.to(flat.line.device, copy=True)
            old = flat.read(begin, begin + len(new)).clone()
            account_run(sums, self._live.space, int(self._whole[share]), begin, new, old)
            yield Elements(partial(_put_run, flat, begin), new, old, 0, one.spec.name)


class HostTally:
    """On hosts what is written is compared at once.

    Args:
        ledger: Digests before. Not changed.

    Attributes:
        ledger: Those that everything that was staged leads to.
    """

    is_restored = True

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = Ledger(ledger.space, ledger.sums.copy())

    def check_written(self) -> None:
        """It was."""


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """Elements that are written together, wherever they live.

    Attributes:
        put: Writes such bits. Returns whether they were read back.
        new, old: [n]: bits.
        other_bytes: Memory that `put` needs.
        name: Of the parameter; "" if they are of several.
    """

    put: Callable[[Any], bool]
    new: Tensor | Bits
    old: Tensor | Bits
    other_bytes: int
    name: str = ""

    @property
    def num_bytes(self) -> int:
        return self.other_bytes + self.new.nbytes + self.old.nbytes

    def commit(self) -> None:
        """Write, and read back. Raises DigestMismatch."""
        if not self.put(self.new):
            named = f"{self.name}: " if self.name else ""
            raise DigestMismatch(f"{named}the weights read back are not those that were written")

    def restore(self) -> bool:
        """Write the old bits. Returns whether they were read back."""
        return self.put(self.old)


def _put_run(live: Live, start: int, bits: Tensor) -> bool:
    live.write(start, bits)
    return are_equal(live.read(start, start + len(bits)), bits)


def _put_scattered(live: Live, where: Tensor | Callable[[], Tensor], bits: Tensor) -> bool:
    positions = where if isinstance(where, Tensor) else where()
    live.scatter(positions, bits)
    return torch.equal(live.gather(positions), bits)


class Staging:
    """The changes of one sync at a receiver, from checked bytes to written weights.

    Staging checks, copies and predicts while the engine serves and writes nothing; `commit`
    writes and reads back; `undo` restores.

    With `in_place`, for receivers without that memory, what is staged is written at once and
    nothing of it is kept. A payload is checked whole before its first element is written. The
    engine must be paused. There is no undo: broken off after a write, the model is dirty.

    Args:
        live: The live weights.
        max_bytes: Memory of what is staged. Beyond it `stage` raises LimitExceeded.
        in_place: Write what is staged, at once.
        writing: Called before `stage` writes in place.

    Attributes:
        in_place: Whether it does so.
        staged_bytes: Memory held.
    """

    def __init__(
        self,
        live: LiveWeights,
        *,
        max_bytes: int,
        in_place: bool = False,
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        self.in_place, self._writing, self._max_bytes = in_place, writing, max_bytes
        self._staged: list[Staged] = []
        self._tally = live.tally()
        self.staged_bytes = 0

    @property
    def ledger(self) -> Ledger:
        """The digests that the weights have after `commit`. Raises InvalidIndices."""
        return self._tally.ledger

    def stage(self, received: Received, progress: Callable[[], None] = lambda: None) -> None:
        """Take over changes that were checked: their memory is needed no longer than until the next
        ones are received. Raises LimitExceeded.

        Args:
            received: The changes.
            progress: Called often.
        """
        progress()
        for staged in received.lane.changes(received, self._tally, in_place=self.in_place):
            progress()
            if self.in_place:
                self._writing()
                staged.commit()
                continue
            self.staged_bytes += staged.num_bytes
            if self.staged_bytes > self._max_bytes:
                raise LimitExceeded("the sync is larger than its begin declared")
            self._staged.append(staged)

    def commit(self) -> int:
        """Write everything and read it back. Returns the digest of the weights.

        Raises DigestMismatch for what is not there, and whatever a write raises; the caller then
        calls `undo`.
        """
        for staged in self._staged:
            staged.commit()
        self._tally.check_written()
        return self.ledger.total

    def undo(self) -> None:
        """Put the old bits back and check that they are there. Raises DigestMismatch."""
        if self.in_place:
            raise DigestMismatch("weights that were written in place cannot be put back")
        are_there = [staged.restore() for staged in reversed(self._staged)]
        if not (all(are_there) and self._tally.is_restored):
            raise DigestMismatch("undo failed: the weights are not what they were")


def _is_simple(flat: Live | None) -> bool:
    """Whether all elements lie in host memory in one run."""
    return (
        isinstance(flat, Flat)
        and flat.is_contiguous
        and flat.line.is_cpu
        and not flat.line.data_ptr() % flat.line.itemsize
    )
