"""What one call of `send_weights` did: counts, bytes and seconds."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

from deltasync.delta.coding import Coding
from deltasync.delta.snapshot import Plan
from deltasync.delta.tiles import Ints
from deltasync.errors import NoReceivers, SyncAborted, TransportTimeout
from deltasync.sync.events import Phase, SyncEvent, SyncFailed
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.round import SentBuckets
from deltasync.sync.protocol.sender_session import SenderSession
from deltasync.sync.source.weights import Masters, Weights
from deltasync.sync.target.base import some_of
from deltasync.wire.messages import ParameterSpec

logger = logging.getLogger(__name__)

_REMEMBERED, _LEAST = 50, 8  # densities that are compared with, and from how many on
_LIMIT = 50  # deltas in a row in which what should change has not
_FACTOR = 10.0  # of the usual density


def reasons(lost: Mapping[str, str]) -> str:
    """One text of `SyncStats.lost`; empty if nothing was lost."""
    return "; ".join(f"{who}: {why}" for who, why in lost.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats(SyncEvent):
    """One call of `send_weights`.

    Attributes:
        version: The version that receivers hold now.
        base_version: The version that the delta was taken against; None for a full sync.
        kind: "delta", or "full" when there was no member to send a delta to.
        receivers: Members that hold the version.
        joined: Receivers that joined in this call, by digest alone or by a full sync.
        full_synced: Those of them that needed a full sync.
        lost: Why members left, by "engine[rank/world]", and why engines were refused, by name.
        numel: Elements of the model.
        nnz: Elements that differed from the snapshot (all, in a full sync).
        changed: Parameters of which an element differed (all, in a full sync).
        payload_bytes: Bytes of all payloads as sent to each receiver, tables included.
        dense_bytes: Bytes of all values: what a dense sync sends.
        joined_bytes: Payload bytes of full syncs to joining receivers, besides the delta's, also of
            those that failed.
        bytes_by_codec: `payload_bytes` by what was done to payloads: as `compression`, or "zstd"
            where a codec has no old bits, or "none" where nothing made one shorter.
        compression: What payloads were coded with.
        num_buckets: Payloads of the delta, or of the full sync.
        diff_s: Time to compare the source with the snapshot, digests included.
        transfer_s: The rest, from the first frame until every receiver has prepared.
        commit_s: From the decision until every receiver has committed: the pause.
        receiver_commit_s: The longest time in which a receiver wrote and read back.
        total_s: The whole call.
        sender_bytes: Memory of the sync besides the snapshot: changes held and two buckets.
        receiver_bytes: The most memory that a receiver used for staging.
        snapshot_bytes: Size of the sender's snapshot.
        wait_s: Of `transfer_s`, the time after everything was sent: receivers stage and predict.
        attempts: Rounds that the delta took; more than 1 if a receiver was lost before the
            decision.
        stream_id: The training run.
        engines: Names of the engines that hold the version, in order.
        ended_at: When the call ended, in seconds since the Unix epoch.
        phases: Parts of the call, of each attempt: "capture", "compare", "send", "wait", "commit",
            and "join", for the full sync of receivers that join members.
        warnings: What an operator should look at. Each is logged too.
    """

    version: int
    base_version: int | None
    kind: Literal["delta", "full"]
    receivers: int
    numel: int
    nnz: int
    payload_bytes: int
    dense_bytes: int
    diff_s: float
    transfer_s: float
    commit_s: float
    receiver_commit_s: float
    total_s: float
    sender_bytes: int
    receiver_bytes: int
    snapshot_bytes: int
    num_buckets: int = 0
    joined: int = 0
    full_synced: int = 0
    joined_bytes: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    changed: int = 0
    bytes_by_codec: dict[str, int] = field(default_factory=dict)
    compression: Coding = "none"
    wait_s: float = 0.0
    attempts: int = 1
    stream_id: str = ""
    engines: tuple[str, ...] = ()
    ended_at: float = 0.0
    phases: tuple[Phase, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def density(self) -> float:
        """Share of the elements that changed, 0 to 1."""
        return self.nnz / self.numel if self.numel else 0.0

    def __str__(self) -> str:
        """One line, as it is logged."""
        return (
            f"v{self.version}: {self.kind}, {self.density:.2%} of {self.numel:,} elements, "
            f"{self.payload_bytes + self.joined_bytes:,} bytes, {self.receivers} receivers "
            f"({self.joined} joined, {len(self.lost)} lost), {self.total_s * 1e3:.1f} ms"
        )


def nothing_sent(
    lost: Mapping[str, str], *, is_too_late: bool
) -> NoReceivers | SyncAborted | TransportTimeout:
    """Why a call has sent nothing. `is_too_late`: its total timeout has passed."""
    if is_too_late:
        why = reasons(lost) or "before a version was decided"
        return TransportTimeout(f"total_timeout_s has passed ({why}); send again")
    if lost:
        return SyncAborted(f"no receiver is left ({reasons(lost)}); the next sync covers this one")
    return NoReceivers("no receiver is connected; start one, or call wait_for_receivers first")


@dataclass(slots=True)
class SenderCall:
    """What a sender notes of one call of `send_weights`.

    Attributes:
        stream_id: The training run.
        version: What is attempted.
        lost: What is lost so far, see `SyncStats`. Not owned.
        began: When it began, by `time.perf_counter`.
        phases: Its parts so far, by the same clock.
        attempts: Rounds that a delta took.
        sent, joined_sent: Members have got, or all if there were none; and those that join them.
        joined, full_synced, receiver_bytes, receiver_commit_s: See `SyncStats`.
    """

    stream_id: str
    version: int
    lost: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    phases: list[Phase] = field(default_factory=list)
    attempts: int = 0
    sent: SentBuckets = field(default_factory=SentBuckets)
    joined_sent: SentBuckets = field(default_factory=SentBuckets)
    joined: int = 0
    full_synced: int = 0
    receiver_bytes: int = 0
    receiver_commit_s: float = 0.0

    def seconds(self, *names: str) -> float:
        """What parts of these names have taken, from the capture on, if there was one."""
        all_names = [name for name, *_ in self.phases]
        begin = all_names.index("capture") if "capture" in all_names else 0
        return sum(end - start for name, start, end in self.phases[begin:] if name in names)

    def failed(self, error: BaseException, session: SenderSession) -> SyncFailed:
        """What is reported of it if this was raised. Members have stayed, as those that sleep."""
        members = {name for e in session.members.values() for name in e.named("")}
        return SyncFailed(
            role="sender",
            error=error,
            stream_id=self.stream_id,
            version=self.version,
            lost={who: why for who, why in self.lost.items() if who not in members},
            receivers=len(members),
            total_s=time.perf_counter() - self.began,
            ended_at=time.time(),
            phases=self.parts(),
        )

    def parts(self) -> tuple[Phase, ...]:
        """Its parts in seconds since it began."""
        return tuple((name, a - self.began, b - self.began) for name, a, b in self.phases)


def stats_of(
    weights: Weights,
    delta: Plan | None,
    call: SenderCall,
    *,
    session: SenderSession,
    watch: DeltaWatch,
    options: SenderOptions,
) -> SyncStats:
    """Count a sync.

    Args:
        weights, options: What was sent, and how.
        delta: What members got; None if there were none.
        call: The call, which ends now; `session`: who holds the version.
        watch: What notices anything unusual of it.
    """
    layout, sent = weights.layout, call.sent
    warnings = watch.look(weights, delta, version=session.version)
    return SyncStats(
        version=session.version,
        base_version=delta.base_version if delta else None,
        kind="delta" if delta else "full",
        receivers=sum(len(engine.ranks) for engine in session.members.values()),
        joined=call.joined,
        full_synced=call.full_synced,
        lost=dict(call.lost),
        numel=layout.numel,
        nnz=delta.nnz if delta else layout.numel * bool(call.full_synced),
        changed=int(np.count_nonzero(delta.counts)) if delta else len(layout.specs),
        payload_bytes=sent.bytes_by_codec.total(),
        dense_bytes=layout.num_bytes,
        joined_bytes=call.joined_sent.bytes_by_codec.total(),
        bytes_by_codec=dict(sent.bytes_by_codec),
        compression=options.compression,
        num_buckets=sent.num_buckets,
        diff_s=call.seconds("compare" if delta else "capture"),
        transfer_s=call.seconds("send", "wait"),
        commit_s=call.seconds("commit"),
        receiver_commit_s=call.receiver_commit_s,
        total_s=time.perf_counter() - call.began,
        sender_bytes=(delta.held_bytes if delta else 0) + 2 * sent.bucket_bytes,
        receiver_bytes=call.receiver_bytes,
        snapshot_bytes=weights.snapshot_bytes,
        wait_s=call.seconds("wait"),
        attempts=call.attempts if delta else 1,
        stream_id=call.stream_id,
        engines=tuple(sorted(session.members)),
        ended_at=time.time(),
        phases=call.parts(),
        warnings=warnings,
    )


class DeltaWatch:
    """Looks at each delta of one sender that was decided.

    Costs a few numpy calls for each delta, whatever the number of parameters, and now and then a
    look at those that have not changed.
    """

    def __init__(self) -> None:
        self._specs: Sequence[ParameterSpec] = ()
        self._deltas = self._silent = 0  # in which something has changed; in which nothing has
        self._changed_in: Ints = np.zeros(0, np.int64)  # by parameter; or looked at in
        self._named = set[int]()
        self._masters: Masters = {}  # at first, or when they were looked at
        self._densities: deque[float] = deque(maxlen=_REMEMBERED)
        self._warned_of = 0.0  # the density of the last warning, while it is high

    def look(self, weights: Weights, delta: Plan | None, *, version: int) -> tuple[str, ...]:
        """`warnings` of `SyncStats`; they are logged too.

        Args:
            weights: Whose delta it is.
            delta: What was sent, all of it; None for a full sync.
            version: What it has brought.
        """
        self._fit(weights)
        if delta is None:
            return ()
        if nnz := delta.nnz:
            density = nnz / weights.layout.numel
            found = [self._unchanged(weights, delta), self._jump(density)]
        else:
            found = [self._silence()]
        warnings = tuple(filter(None, found))
        for text in warnings:
            logger.warning("v%d: %s", version, text)
        return warnings

    def _fit(self, weights: Weights) -> None:
        """Start over if this is another model."""
        specs = weights.layout.specs
        if specs is self._specs:
            return
        if [spec.names for spec in specs] != [spec.names for spec in self._specs]:
            self._deltas, self._changed_in = 0, np.zeros(len(specs), np.int64)
            self._named.clear()
            self._masters = weights.masters(range(len(specs)))
            self._densities.clear()
            self._warned_of = 0.0
        self._specs = specs

    def _silence(self) -> str:
        """Say once that nothing at all has changed in so many deltas in a row."""
        self._silent += 1
        if self._silent != _LIMIT:
            return ""
        return (
            f"nothing has changed in {_LIMIT} deltas: if training goes on, check that the source "
            "has what the optimizer steps, and that its steps show in the dtype that is sent"
        )

    def _unchanged(self, weights: Weights, delta: Plan) -> str:
        """Which trained parameters should have changed in so many deltas; each is named once."""
        self._deltas, self._silent = self._deltas + 1, 0
        self._changed_in[delta.counts > 0] = self._deltas
        is_due = self._changed_in <= self._deltas - _LIMIT
        if not is_due.any():
            return ""
        self._changed_in[is_due] = self._deltas  # so that they are looked at again
        due = set(np.flatnonzero(is_due).tolist())
        before, now = self._masters, weights.masters(due)
        stale = [n for n in now if now[n] == before.get(n) and n not in self._named]
        self._masters = {n: one for n, one in before.items() if n not in due} | now
        self._named.update(stale)
        text = (
            f"{some_of([self._specs[n].name for n in stale])} require grad and have not changed in "
            f"{_LIMIT} deltas: check that the optimizer has them, and that they get gradients"
        )
        return text if stale else ""

    def _jump(self, density: float) -> str:
        """Say that a density is far above those before; once until it is back, or far higher."""
        usual = median(self._densities) if len(self._densities) >= _LEAST else None
        self._densities.append(density)
        if usual is None or density <= _FACTOR * usual:
            self._warned_of = 0.0
            return ""
        if density <= _FACTOR * self._warned_of:
            return ""
        self._warned_of = density
        return (
            f"{density:.3%} of the elements changed, the median of the deltas before is "
            f"{usual:.3%}: check the learning rate, and whether something loaded other weights"
        )
