"""What each rank of a trainer does with its own part when rank 0 orders it, rank 0 among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from deltasync.delta.host import digest_run
from deltasync.delta.ledger import Ledger, digest_text
from deltasync.delta.snapshot import Plan
from deltasync.delta.tiles import CHUNK, Space
from deltasync.errors import SyncAborted, VersionGap
from deltasync.sync.group import orders
from deltasync.sync.group.agreement import Agreement, text_of, words_of
from deltasync.sync.group.model import digests_told, share_of_rank
from deltasync.sync.source.tensors import maxima_of
from deltasync.sync.source.weights import OwnWeights, SourceLayout
from deltasync.wire.digest import MASK

_CHUNKS_AT_ONCE = 256  # about, of a warm sync


class RankWork:
    """Declares, captures and compares what one rank holds.

    Args:
        weights: What the rank compares and sends.
        rank, world: Which one of how many this is.

    Attributes:
        weights: The same.
        captured: The capture that the snapshot comes from; None if there is none.
        undecided: The version that was compared last, and how it differs, while nobody knows
            whether receivers hold it.
    """

    _alike: SourceLayout  # what others hold too, once it has captured

    def __init__(self, weights: OwnWeights, rank: int, world: int) -> None:
        self.weights, self._rank, self._world = weights, rank, world
        self._declared: orders.Declared | None = None
        self._agreement = Agreement()
        self.captured: str | None = None
        self.undecided: tuple[int, Plan] | None = None
        self._base: int | None = None  # version of the snapshot; None right after a capture

    def answer(self, order: orders.Order) -> orders.Answer:
        """Carry out an order, and say what it comes to. Raises SyncAborted, SourceChanged."""
        match order:
            case orders.Declare():
                self._declared = orders.Declared.of(self.weights.source.tensors())
                self._agreement = Agreement()
                return self._declared
            case orders.Measure():
                return self._measure(order, self._known())
            case orders.Capture():
                self._capture(order, self._known())
                return self._state(alike=self._digests())
            case orders.Ask():
                return self._state(order.copies)
            case orders.Compare():
                return self._compare(order)
        raise AssertionError(f"{order.kind} is no work of one rank alone")

    def resolve(self, version: int) -> None:
        """Record that receivers hold this version: the one compared last, or an earlier one."""
        if self.undecided is None or self.undecided[0] != version:
            return
        (_, delta), self.undecided = self.undecided, None
        delta.decided()
        self._base = version  # last: whatever breaks off here has another base than receivers

    def _known(self) -> orders.Declared:
        if self._declared is None:
            raise SyncAborted("this rank was restarted, and has not declared what it holds")
        return self._declared

    def _measure(self, order: orders.Measure, declared: orders.Declared) -> orders.Measured:
        if order.maxima is not None:
            self._agreement = Agreement(order.maxima)
            now = maxima_of(self.weights.source.tensors())
        elif self.captured is None:
            raise SyncAborted("this rank was restarted, and has no snapshot")
        else:
            now = self.weights.maxima()
        return orders.Measured(found=text_of(self._agreement.found(declared.places, now)))

    def _capture(self, order: orders.Capture, declared: orders.Declared) -> None:
        self.captured = self.undecided = self._base = None
        specs, boxes = share_of_rank(order, self._rank, declared)
        source = self.weights.source
        tensors = source.tensors()
        self._agreement.give(words_of(order.agreed), maxima_of(tensors))
        self.weights.capture_as(specs, boxes, tensors)
        numbers = np.flatnonzero(orders.copies_of(order.alike[self._rank], len(specs)))
        alike = {name: declared.boxes[name] for name in (specs[n].name for n in numbers)}
        self._alike = SourceLayout(source, specs, tensors, alike)
        self._ledger = Ledger(Space(self._alike.sent))
        chunks = sum(-(-spec.numel // CHUNK) for spec in specs)  # the same on all ranks
        self._parts = -(-chunks // _CHUNKS_AT_ONCE)
        self.captured = order.capture

    def _state(
        self, copies: Sequence[orders.CopyRuns] = (), alike: orders.Alike = ()
    ) -> orders.Found:
        plan = self.weights.full(ways=self._world)
        return orders.Found(
            digests=digests_told(self.weights.digests, copies, len(self.weights.layout.specs)),
            payload_bytes=plan.payload_bytes,
            places=plan.places,
            alike=alike,
        )

    def _compare(self, order: orders.Compare) -> orders.Found:
        if self._agreement.runs:
            self._agreement.give(words_of(order.agreed), self.weights.maxima())
        version, self.undecided = order.version, None
        if self._base is None:
            self._base = version
        if self._base != version:
            raise VersionGap(held=self._base, base=version, offered=version + 1)
        delta = self.weights.delta(version)
        self.undecided = version + 1, delta
        is_changed = self.weights.counts_by(delta) > 0
        return orders.Found(
            payload_bytes=delta.payload_bytes,
            places=delta.places,
            nnz=delta.nnz,
            changed=orders.runs_of(is_changed.astype(np.uint64)),
            alike=self._digests(order.call),
        )

    def _digests(self, part: int | None = None) -> orders.Alike:
        """Of what others hold too: of all, or of a part that is another one for each `part`."""
        self._alike.read(self.weights.layout.tensors)
        ledger, found = self._ledger, Counter[str]()
        space, chunks = ledger.space, np.arange(ledger.space.num_chunks)
        nth = chunks - space.first_chunk[ledger.share]
        turns = ledger.parameter_of(chunks) + nth - (part or 0)
        for chunk in np.flatnonzero(turns % (1 if part is None else self._parts) == 0).tolist():
            share, start, stop = space.bounds(chunk)
            bits = self._alike.readers[int(space.order[share])].read(start, stop)
            found[space.shares[share].spec.name] += digest_run(space, share, start, bits)
        return tuple((name, digest_text(digest & MASK)) for name, digest in found.items())
