"""The weights of a trainer of several ranks, each of which compares and sends what it holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.shard import ShardSpec, share_out
from deltasync.errors import SyncAborted
from deltasync.sync.group import orders
from deltasync.sync.group.group import GroupCalls
from deltasync.sync.protocol.agreement import Digests
from deltasync.sync.protocol.frames import SentBuckets
from deltasync.sync.source.layout import SentLayout, coverage_of, source_specs, specs_of
from deltasync.sync.source.plan import Delta, Payload, Plan
from deltasync.sync.source.tensors import NamedTensor, held_of
from deltasync.sync.source.weights import OwnWeights
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec, entries, parameter_specs

Copies = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a rank holds.

    Attributes:
        specs: In the dtypes that its source has.
        boxes: By canonical name.
        trained: Names of those that the optimizer changes.
    """

    specs: tuple[ParameterSpec, ...]
    boxes: dict[str, ShardSpec]
    trained: frozenset[str]

    @classmethod
    def of(cls, tensors: Sequence[NamedTensor]) -> Declaration:
        """Of a source. Raises ConfigError for tensors that cannot be sent."""
        boxes = {entry.name: held_of(entry)[0] for entry in tensors}
        trained = frozenset(entry.name for entry in tensors if entry.tensor.requires_grad)
        return cls(source_specs(tensors), boxes, trained)

    @classmethod
    def told(cls, said: orders.Declared) -> Declaration:
        """As another rank has said it. Raises WireError, ConfigError."""
        specs = parameter_specs(said.parameters)
        boxes = {spec.name: ShardSpec(*box) for spec, box in zip(specs, said.boxes, strict=True)}
        named = zip(specs, said.trained, strict=True)
        return cls(specs, boxes, frozenset(spec.name for spec, is_trained in named if is_trained))

    def said(self) -> orders.Declared:
        """For the rank that speaks for all."""
        return orders.Declared(
            parameters=entries(self.specs),
            boxes=tuple((box.shape, box.offset, box.size) for box in self.boxes.values()),
            trained=tuple(spec.name in self.trained for spec in self.specs),
        )


class GroupDigests:
    """Digests that all ranks add up to.

    Args:
        own: Of this rank.
        others: Of the other ranks, all together, by what was asked for.
        ask: Asks them for more, or raises.
    """

    def __init__(
        self, own: Digests, others: Mapping[bytes, int], ask: Callable[[Copies | None], int]
    ) -> None:
        self._own, self._peer_ranks, self._ask = own, others, ask

    @property
    def total(self) -> int:
        return self.digest_of(None)

    def digest_of(self, copies: Copies | None) -> int:
        """Raises SyncAborted if a rank does not tell."""
        others = self._peer_ranks.get(_key(copies))
        if others is None:
            others = self._ask(copies)
        return (self._own.digest_of(copies) + others) & MASK


class GroupPlan:
    """What all ranks send together; this one its own part."""

    def __init__(
        self, own: Plan, group: GroupWeights, *, sparse_bytes: int, dense_bytes: int
    ) -> None:
        self._own, self._group = own, group
        self.base_version = own.base_version
        self.sparse_bytes = own.sparse_bytes + sparse_bytes
        self.dense_bytes = own.dense_bytes + dense_bytes

    @property
    def ledger(self) -> Digests:
        return self._group.sent_digests(self._own.ledger)

    def buckets(self) -> Iterator[Payload]:
        """Those of this rank."""
        return self._own.buckets()

    def decided(self) -> None:
        """Advance the snapshots of all ranks. One that does not hear of it is missed later."""
        self._own.decided()
        self._group.decided()


class GroupDelta(GroupPlan):
    """What all ranks have found to differ."""

    def __init__(
        self,
        own: Delta,
        group: GroupWeights,
        changed: set[int],
        found: Collection[orders.Compared],
    ) -> None:
        sparse_bytes = sum(one.sparse_bytes for one in found)
        dense_bytes = sum(one.dense_bytes for one in found)
        super().__init__(own, group, sparse_bytes=sparse_bytes, dense_bytes=dense_bytes)
        self.nnz = own.nnz + sum(one.nnz for one in found)
        self.held_bytes = max([own.held_bytes, *(one.held_bytes for one in found)])
        self.changed = changed.union(*map(_changed, found))


class GroupWeights:
    """The model of a trainer of several ranks, seen from the one that speaks for all.

    Nothing is gathered: ranks exchange names once, and counts and digests in each sync.

    Args:
        own: What this rank compares and sends itself.
        group: The other ranks.
    """

    def __init__(self, own: OwnWeights, group: GroupCalls) -> None:
        self._own, self._group = own, group
        self.stream = own.stream
        self._layout: SentLayout | None = None
        self._declared: list[Declaration] = []
        self._capture = ""
        self._attempt = 0
        self._asked: list[Copies | None] = [None]
        self._held: dict[int, orders.SnapshotState] = {}
        self._sums: dict[bytes, int] = {}  # of the other ranks' snapshots, by what was asked
        self._sent: dict[bytes, int] = {}  # of what they sent last

    @property
    def layout(self) -> SentLayout | None:
        return self._layout

    @property
    def is_lost(self) -> bool:
        is_known = all(known == self._capture for known in self._group.captures.values())
        return self._layout is not None and not is_known

    @property
    def digests(self) -> Digests:
        return GroupDigests(self._own.digests, self._sums, self._ask)

    @property
    def snapshot_bytes(self) -> int:
        return max([self._own.snapshot_bytes, *(h.snapshot_bytes for h in self._held.values())])

    def declared(self) -> tuple[ParameterSpec, ...]:
        """Of all ranks. They say so once, in a call or, if none is under way, in the next one."""
        if not self._declared:
            if not self._group.is_called:
                self._group.gather()
            self._declared = self._declarations()
        known: dict[str, ParameterSpec] = {}
        for declaration in self._declared:
            known = {spec.name: spec for spec in declaration.specs} | known
        return tuple(known.values())

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        if self.is_lost:
            self._declared = []
        specs = specs_of(self.declared(), held, self._own.options.wire_dtypes)
        boxes = [declaration.boxes for declaration in self._declared]
        shares = share_out(boxes, {spec.name: spec.dtype.item_size for spec in specs})
        numbers = {spec.name: number for number, spec in enumerate(specs)}
        parts = tuple(
            tuple((numbers[n], box.offset, box.size) for n, box in share.items() if box != own[n])
            for own, share in zip(boxes, shares, strict=True)
        )
        withheld = np.zeros((len(boxes), len(specs)), np.uint64)
        for rank, (own, share) in enumerate(zip(boxes, shares, strict=True)):
            withheld[rank, [numbers[name] for name in own.keys() - share.keys()]] = 1
        self._layout, self._capture = None, uuid.uuid4().hex
        self._group.order(
            orders.Capture(
                call=self._group.call,
                capture=self._capture,
                parameters=entries(specs),
                shares=parts,
                withheld=tuple(map(orders.runs_of, withheld)),
            )
        )
        self._own.capture_as(specs, shares[0])
        try:
            self._hear([None])
        except SyncAborted:  # a rank may be another one than that which has declared
            self._declared = []
            raise
        self._group.captures = dict.fromkeys(self._held, self._capture)
        self._layout = SentLayout(specs)

    def delta(self, base_version: int) -> Delta:
        self._group.order(orders.Compare(call=self._group.call, base_version=base_version))
        own = self._own.delta(base_version)
        found = self._group.answers(orders.Compared).values()
        return GroupDelta(own, self, self._own.changed_by(own), found)

    def full(self) -> Plan:
        return GroupPlan(
            self._own.full(ways=self._group.world),
            self,
            sparse_bytes=sum(held.sparse_bytes for held in self._held.values()),
            dense_bytes=sum(held.dense_bytes for held in self._held.values()),
        )

    def coverage(self, changed: Collection[int], *, full: bool) -> dict[str, int]:
        specs = () if self._layout is None else self._layout.specs
        trained = frozenset().union(*(declaration.trained for declaration in self._declared))
        return coverage_of([spec.name in trained for spec in specs], changed, full=full)

    def next_attempt(self) -> int:
        """See `round.PeerRanks`."""
        self._attempt += 1
        return self._attempt

    def start(
        self,
        receivers: Sequence[str],
        version: int,
        base_version: int | None,
        *,
        timeout_s: float,
    ) -> None:
        """See `round.PeerRanks`."""
        self._version = version
        self._group.order(
            orders.Send(
                call=self._group.call,
                attempt=self._attempt,
                version=version,
                base_version=base_version,
                receivers=tuple(receivers),
                timeout_s=timeout_s,
                copies=_runs(self._asked),
            )
        )

    def sent(self) -> SentBuckets:
        """See `round.PeerRanks`."""
        answers = self._group.answers(orders.Sent)
        lost = {
            connection: f"rank {rank} of the trainer: {why}"
            for rank, sent in answers.items()
            for connection, why in sent.lost
        }
        self._sent = {} if lost else _added(self._asked, answers.values())
        return SentBuckets(
            num_buckets=sum(sent.num_buckets for sent in answers.values()),
            payload_bytes=sum(sent.payload_bytes for sent in answers.values()),
            bucket_bytes=max((sent.bucket_bytes for sent in answers.values()), default=0),
            lost=lost,
        )

    def sent_digests(self, own: Digests) -> Digests:
        """Of what was sent last."""
        return GroupDigests(own, self._sent, _not_told)

    def decided(self) -> None:
        """What was sent last is a version."""
        self._sums = self._sent
        with suppress(SyncAborted):
            self._group.order(orders.Decide(call=self._group.call, version=self._version))

    def _declarations(self) -> list[Declaration]:
        self._group.order(orders.Declare(call=self._group.call))
        own = Declaration.of(self._own.source.tensors())
        answers = self._group.answers(orders.Declared)
        return [own, *(Declaration.told(answers[rank]) for rank in range(1, self._group.world))]

    def _ask(self, copies: Copies | None) -> int:
        """What the other ranks hold of it. From now on they tell it of whatever they send."""
        if _key(copies) not in self._sums:
            asked = [*self._asked, copies]
            self._group.order(orders.Ask(call=self._group.call, copies=_runs(asked)))
            self._hear(asked)
        return self._sums[_key(copies)]

    def _hear(self, asked: list[Copies | None]) -> None:
        """What the other ranks hold now."""
        self._held = self._group.answers(orders.SnapshotState)
        self._asked, self._sums = asked, _added(asked, self._held.values())


def _added(
    asked: Sequence[Copies | None],
    answers: Collection[orders.SnapshotState] | Collection[orders.Sent],
) -> dict[bytes, int]:
    """What ranks have told of it, all together. The first is the whole model, and goes unasked."""
    return {
        _key(copies): sum(int(answer.digests[place], 16) for answer in answers) & MASK
        for place, copies in enumerate(asked)
    }


def _runs(asked: Sequence[Copies | None]) -> tuple[orders.CopyRuns, ...]:
    return tuple(orders.runs_of(copies) for copies in asked if copies is not None)


def _not_told(copies: Copies | None) -> int:
    raise SyncAborted("digests of a new kind of receiver are told when it joins")


def _key(copies: Copies | None) -> bytes:
    return b"" if copies is None else copies.tobytes()


def _changed(found: orders.Compared) -> set[int]:
    return set(np.flatnonzero(orders.copies_of(found.changed)).tolist())
