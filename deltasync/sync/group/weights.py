"""The weights of a trainer of several ranks, each of which compares and sends what it holds."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.snapshot import Bucket, Digests, Plan
from deltasync.delta.tiles import Ints
from deltasync.errors import ConfigError, SourceChanged, SyncAborted
from deltasync.sync.group import orders
from deltasync.sync.group.agreement import NOTHING, Agreement, Words, text_of, words_of
from deltasync.sync.group.group import A, TrainerGroup
from deltasync.sync.group.model import (
    GroupDigests,
    capture_order,
    digests_added,
    key,
    refuse_drifted,
)
from deltasync.sync.group.work import RankWork
from deltasync.sync.protocol.links import CallTimeout
from deltasync.sync.protocol.round import SentBuckets
from deltasync.sync.protocol.sender_session import Copies, Engine
from deltasync.sync.source.layout import SentLayout, specs_of, with_elements
from deltasync.sync.source.weights import LocalWeights, Masters, OwnWeights
from deltasync.wire.messages import ParameterSpec


class GroupPlan(Plan):
    """What all ranks send together. This rank sends its own part.

    Args:
        own: The part of rank 0.
        weights: Of all ranks.
        found: What each has to send.
    """

    def __init__(self, own: Plan, weights: GroupWeights, found: Collection[orders.Found]) -> None:
        super().__init__(own.space, (), base_version=own.base_version)
        self._own, self._weights, self._found = own, weights, found
        self.payload_bytes = sum(one.payload_bytes for one in found)
        self.places = sum(one.places for one in found)
        self.held_bytes = own.held_bytes

    @property
    def nnz(self) -> int:
        return sum(one.nnz for one in self._found)

    @cached_property
    def counts(self) -> Ints:
        """int64[parameters]: on how many ranks each differs."""
        numbers = len(self._weights.layout.specs)
        each = (orders.copies_of(one.changed, numbers) for one in self._found)
        counts: Ints = np.sum([one.astype(np.int64) for one in each], axis=0)
        return counts

    @property
    def ledger(self) -> Digests:
        return GroupDigests(self._own.ledger, self._weights.digests_sent)

    def buckets(self) -> Iterator[Bucket]:
        """The payloads of this rank."""
        return self._own.buckets()

    def decided(self) -> None:
        """Advance the snapshot. The other ranks do so when they hear of the next version."""
        self._weights.decided(self.base_version)


class GroupWeights:
    """The model of a trainer of several ranks, as rank 0 sees it.

    Nothing is gathered: ranks exchange names once, and counts and digests in each sync. Methods
    that send orders to the other ranks raise SyncAborted; properties send none.

    Args:
        own: What this rank compares and sends itself.
        group: The other ranks.

    Attributes:
        digests_held: Digests of the snapshots of all other ranks together, by `key` of the copies.
        digests_sent: The same of what they have sent last, which become those when it is decided.
    """

    def __init__(self, own: LocalWeights, group: TrainerGroup) -> None:
        """Raises ConfigError for weights that come one by one."""
        if not isinstance(own, OwnWeights):
            raise ConfigError("a rank of a group needs a source of what it holds")
        self._own, self._group, self._work = own, group, RankWork(own, 0, group.world)
        self.layout = SentLayout(())
        self._declared: list[orders.Declared] = []
        self._positions: list[NDArray[np.int64]] = []
        self._capture = ""
        self.snapshot_bytes = 0
        self._snapshots: list[orders.Found] = []
        self._asked: list[Copies] = []  # by the last order to send
        self.digests_held: dict[bytes, int] = {}
        self.digests_sent: dict[bytes, int] = {}
        self._agreement = Agreement()

    @property
    def is_lost(self) -> bool:
        """Whether a rank's snapshot is not of this capture, since it was restarted."""
        is_known = all(known == self._capture for known in self._group.captures.values())
        return bool(self.layout.specs) and not is_known

    @property
    def digests(self) -> Digests:
        return GroupDigests(self._own.digests, self.digests_held)

    def declared(self, *, timeout_s: float = 60.0) -> tuple[ParameterSpec, ...]:
        """The parameters of all ranks, asked for once: in this call, or else in the next one."""
        if not self._declared:
            self._group.gather(CallTimeout(timeout_s))
            self._declared = self._all(orders.Declare(), orders.Declared)
            self._agreement = Agreement.of([one.places for one in self._declared])
            self._positions = [self._agreement.positions(one.places) for one in self._declared]
        every = (spec for declared in reversed(self._declared) for spec in declared.specs)
        return with_elements(tuple({spec.name: spec for spec in every}.values()))

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        if self.is_lost:
            self._declared = []
        specs = specs_of(self.declared(), held, self._own.options.wire_dtypes)
        self.layout, self._capture = SentLayout(()), uuid.uuid4().hex
        try:
            self._take(specs)
        except (SourceChanged, SyncAborted):  # a rank may have been replaced since it declared
            self._declared = []
            raise
        self._group.captures = dict.fromkeys(range(1, self._group.world), self._capture)
        self.layout = SentLayout(specs)

    def _take(self, specs: tuple[ParameterSpec, ...]) -> None:
        """Have all ranks take their snapshots."""
        agreed = text_of(self._agreed(self._agreement.runs))
        order = capture_order(self._declared, specs, name=self._capture, agreed=agreed)
        said = self._all(order, orders.Found)
        self._snapshots, self.digests_held = said, digests_added([], said[1:])
        self.snapshot_bytes = self._own.snapshot_bytes
        refuse_drifted(self._declared, [one.alike for one in said])

    def learn_digests(self, kinds: Collection[Copies | None]) -> None:
        """Ask the other ranks for digests of these copies, unless they are known."""
        asked = [one for one in kinds if one is not None and key(one) not in self.digests_held]
        if asked:
            said = self._all(orders.Ask(copies=tuple(map(orders.runs_of, asked))), orders.Found)
            self.digests_held |= digests_added(asked, said[1:])

    def delta(self, base_version: int) -> Plan:
        said = self._all(orders.Compare(agreed=text_of(self._agreed())), orders.Found)
        refuse_drifted(self._declared, [one.alike for one in said])
        assert self._work.undecided is not None
        plan = GroupPlan(self._work.undecided[1], self, said)
        _ = plan.counts  # what a rank has miscounted is found before anything is sent
        return plan

    def decided(self, base_version: int | None) -> None:
        """What all have sent is decided: what differs from this version, or all of it."""
        if base_version is not None:
            self._work.resolve(base_version + 1)
        self.digests_held = self.digests_sent

    def _all(self, order: orders.Order, kind: type[A]) -> list[A]:
        """What each rank answers to an order, which this rank carries out as well."""
        own = self._work.answer(self._group.order(order))
        assert isinstance(own, kind)
        said = self._group.answers(kind)
        return [own, *(said[rank] for rank in range(1, self._group.world))]

    def _agreed(self, runs: tuple[tuple[str, int], ...] | None = None) -> Words:
        """The maxima of all ranks' weights as they are now.

        Ranks are asked for these `runs`, or for what they were asked for the last time.
        """
        if not self._agreement.runs:
            return NOTHING
        said = self._all(orders.Measure(maxima=runs), orders.Measured)
        return self._agreement.largest(self._positions, [words_of(one.found) for one in said])

    def full(self) -> Plan:
        own = self._own.full(ways=self._group.world)
        return GroupPlan(own, self, self._snapshots)

    def masters(self, numbers: Collection[int]) -> Masters:
        return self._own.masters(numbers)

    def start(
        self,
        engines: Collection[Engine],
        attempt: int,
        *,
        is_delta: bool,
        with_shares: bool,
        timeout_s: float,
    ) -> None:
        """Let the other ranks send to these, which they know by their connections."""
        kinds = [engine.copies for engine in engines if engine.copies is not None]
        self._asked = list({key(one): one for one in kinds}.values())
        ranks = [rank for engine in engines for rank in engine.ranks.values()]
        self._group.order(
            orders.Send(
                attempt=attempt,
                is_delta=is_delta,
                receivers=tuple(rank.connection for rank in ranks),
                with_shares=with_shares,
                timeout_s=timeout_s,
                copies=tuple(map(orders.runs_of, self._asked)),
            )
        )

    def sent(self) -> SentBuckets:
        """What the other ranks have sent, when it is everything. Raises SyncAborted."""
        said, total = self._group.answers(orders.Sent), SentBuckets()
        for rank, one in said.items():
            lost = one.buckets.lost
            told = {name: f"rank {rank} of the trainer: {why}" for name, why in lost.items()}
            total += replace(one.buckets, lost=told)
        self.digests_sent = {} if total.lost else digests_added(self._asked, said.values())
        return total
