"""The weights of a trainer of several ranks, each of which compares and sends what it holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.snapshot import Bucket, Delta, Digests, Plan
from deltasync.delta.tiles import Ints
from deltasync.errors import ConfigError, SourceChanged, SyncAborted
from deltasync.sync.group import orders
from deltasync.sync.group.agreement import NOTHING, Agreement, Replicas, Words, text_of, words_of
from deltasync.sync.group.group import GroupCalls
from deltasync.sync.group.model import (
    Declaration,
    GroupDigests,
    OtherRanks,
    all_specs,
    capture_order,
    refuse_drifted,
    runs_of,
)
from deltasync.sync.protocol.links import CallTimeout
from deltasync.sync.protocol.round import SentBuckets
from deltasync.sync.protocol.sender_session import Copies
from deltasync.sync.source.layout import SentLayout, specs_of, with_elements
from deltasync.sync.source.tensors import Maxima, maxima_of
from deltasync.sync.source.weights import LocalWeights, OwnWeights
from deltasync.wire.messages import ParameterSpec


class GroupPlan:
    """What all ranks send together. This rank sends its own part.

    Args:
        own: The part of rank 0.
        others: What the other ranks have reported.
        found: What each of them has to send.
        decide: Called when the version is final.
    """

    def __init__(
        self,
        own: Plan,
        others: OtherRanks,
        found: Collection[orders.SnapshotState | orders.Compared],
        decide: Callable[[], None],
    ) -> None:
        self._own, self._others, self._decide = own, others, decide
        self.base_version = own.base_version
        self.space = own.space
        self.payload_bytes = own.payload_bytes + sum(one.payload_bytes for one in found)
        self.places = own.places + sum(one.places for one in found)

    @property
    def ledger(self) -> Digests:
        return GroupDigests(self._own.ledger, self._others.sent)

    def buckets(self) -> Iterator[Bucket]:
        """The payloads of this rank."""
        return self._own.buckets()

    def decided(self) -> None:
        """Advance the snapshots of all ranks."""
        self._own.decided()
        self._decide()


class GroupDelta(GroupPlan):
    """What differs on all ranks; on rank 0 `counts` elements of each parameter do.

    Counts of the other ranks are 1 unless `report_density` asks for them.
    """

    def __init__(
        self,
        own: Delta,
        counts: Ints,
        others: OtherRanks,
        found: Collection[orders.Compared],
        decide: Callable[[], None],
    ) -> None:
        super().__init__(own, others, found, decide)
        self.nnz = own.nnz + sum(one.nnz for one in found)
        self.held_bytes = max([own.held_bytes, *(one.held_bytes for one in found)])
        total = counts + sum(orders.copies_of(one.changed).astype(np.int64) for one in found)
        self.changed = np.flatnonzero(total)
        self._counts = total[self.changed]

    def counts(self) -> Ints:
        """int64[n]: elements that differ, of each of `changed`."""
        return self._counts


class GroupWeights:
    """The model of a trainer of several ranks, as rank 0 sees it.

    Nothing is gathered: ranks exchange names once, and counts and digests in each sync. Methods
    that send orders to the other ranks raise SyncAborted; properties send none.

    Args:
        own: What this rank compares and sends itself.
        group: The other ranks.
    """

    _replicas: Replicas  # once it has captured

    def __init__(self, own: OwnWeights, group: GroupCalls) -> None:
        self._own, self._group = own, group
        self._layout: SentLayout | None = None
        self._declared: list[Declaration] = []
        self._positions: list[NDArray[np.int64]] = []
        self._capture = ""
        self._trained = np.zeros(0, np.bool_)
        self._offered = 0
        self._others = OtherRanks()
        self._agreement = Agreement()

    @property
    def layout(self) -> SentLayout | None:
        return self._layout

    @property
    def is_lost(self) -> bool:
        is_known = all(known == self._capture for known in self._group.captures.values())
        return self._layout is not None and not is_known

    @property
    def digests(self) -> Digests:
        return GroupDigests(self._own.digests, self._others.digests)

    @property
    def snapshot_bytes(self) -> int:
        others = (held.snapshot_bytes for held in self._others.snapshots.values())
        return max([self._own.snapshot_bytes, *others])

    def declared(self, *, timeout_s: float = 60.0) -> tuple[ParameterSpec, ...]:
        """The parameters of all ranks, asked for once: in this call, or else in the next one."""
        if not self._declared:
            self._group.gather(CallTimeout(timeout_s))
            self._group.order(orders.Declare(call=self._group.call))
            own = Declaration.of(self._own.source.tensors())
            said = self._group.answers(orders.Declared)
            others = (Declaration.told(said[rank]) for rank in range(1, self._group.world))
            self._declared = [own, *others]
            self._agreement = Agreement.of([one.maxima for one in self._declared])
            positions = self._agreement.positions
            self._positions = [positions(one.maxima) for one in self._declared]
        return with_elements(all_specs(self._declared))

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        if self.is_lost:
            self._declared = []
        specs = specs_of(self.declared(), held, self._own.options.wire_dtypes)
        self._layout, self._capture = None, uuid.uuid4().hex
        try:
            self._take(specs)
        except (SourceChanged, SyncAborted):  # a rank may have been replaced since it declared
            self._declared = []
            raise
        self._group.captures = dict.fromkeys(self._others.snapshots, self._capture)
        self._layout = SentLayout(specs)
        trained = frozenset().union(*(declaration.trained for declaration in self._declared))
        self._trained = np.array([spec.name in trained for spec in specs])

    def _take(self, specs: tuple[ParameterSpec, ...]) -> None:
        """Have all ranks take their snapshots."""
        source = self._own.source
        agreed = self._agreed(lambda: maxima_of(source.tensors()), self._agreement.runs)
        _, order = capture_order(
            self._declared,
            specs,
            call=self._group.call,
            name=self._capture,
            agreed=text_of(agreed),
        )
        self._group.order(order)
        self._replicas = Replicas(self._own, order, 0, self._declared[0], self._agreement)
        alike, said = self._replicas.digests(), self._group.answers(orders.SnapshotState)
        self._others.hold([None], said)
        refuse_drifted(self._declared, [alike, *(said[r].alike for r in sorted(said))])

    def learn_digests(self, kinds: Collection[Copies | None]) -> None:
        """Ask the other ranks for digests of these copies, now and in each later answer."""
        asked = self._others.asked_with(kinds)
        if len(asked) > len(self._others.asked):
            self._group.order(orders.Ask(call=self._group.call, copies=runs_of(asked)))
            self._others.hold(asked, self._group.answers(orders.SnapshotState))

    def delta(self, base_version: int) -> Delta:
        agreed = self._agreed(self._own.maxima)
        compare = orders.Compare(
            call=self._group.call, base_version=base_version, agreed=text_of(agreed)
        )
        self._group.order(compare)
        if self._agreement.runs:
            self._agreement.give(agreed, self._own.maxima())
        own = self._own.delta(base_version)
        counts = self._own.counts_by(own)
        alike = self._replicas.digests(self._group.call)
        said = self._group.answers(orders.Compared)
        refuse_drifted(self._declared, [alike, *(said[r].alike for r in sorted(said))])
        return GroupDelta(own, counts, self._others, said.values(), self._decided)

    def _agreed(
        self,
        own: Callable[[], Mapping[str, Maxima]],
        runs: tuple[tuple[str, int], ...] | None = None,
    ) -> Words:
        """The maxima of all ranks' weights as they are now; `own` gives those of this rank.

        Ranks are asked for these `runs`, or for what they were asked for the last time.
        """
        if not self._agreement.runs:
            return NOTHING
        self._group.order(orders.Measure(call=self._group.call, maxima=runs))
        found = [self._agreement.found(self._declared[0].maxima, own())]
        said = self._group.answers(orders.Measured)
        found += (words_of(said[rank].found) for rank in range(1, self._group.world))
        return self._agreement.largest(self._positions, found)

    def full(self) -> Plan:
        own = self._own.full(ways=self._group.world)
        return GroupPlan(own, self._others, self._others.snapshots.values(), self._decided)

    @property
    def trained(self) -> NDArray[np.bool_]:
        return self._trained

    def masters(self, number: int) -> tuple[bool, int] | None:
        return self._own.masters(number)

    def start(
        self,
        attempt: int,
        receivers: Sequence[str],
        version: int,
        base_version: int | None,
        *,
        with_shares: bool,
        timeout_s: float,
    ) -> None:
        """See `round.PeerRanks`."""
        self._offered = version
        self._group.order(
            orders.Send(
                call=self._group.call,
                attempt=attempt,
                version=version,
                base_version=base_version,
                receivers=tuple(receivers),
                with_shares=with_shares,
                timeout_s=timeout_s,
                copies=runs_of(self._others.asked),
            )
        )

    def sent(self) -> SentBuckets:
        """See `round.PeerRanks`."""
        return self._others.have_sent(self._group.answers(orders.Sent))

    def _decided(self) -> None:
        """Record that what was sent last is decided: engines keep it, whatever happens to a rank.

        One that misses this learns it from the next comparison, or has lost its snapshot: `is_lost`
        is then true, and receivers rejoin.
        """
        self._others.digests = self._others.sent
        with suppress(SyncAborted):
            self._group.order(orders.Decide(call=self._group.call, version=self._offered))


def with_group(own: LocalWeights, group: GroupCalls) -> GroupWeights:
    """The weights of all ranks of a trainer, of which this one holds `own`. Raises ConfigError."""
    if not isinstance(own, OwnWeights):
        raise ConfigError("a rank of a group needs a source of what it holds")
    return GroupWeights(own, group)
