"""What one call of `send_weights` did: counts, bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from deltasync.delta.backend import Delta
from deltasync.errors import NoReceivers, ReceiversLost, SyncAborted, TransportTimeout
from deltasync.sync.protocol.round import RoundResult
from deltasync.sync.source.weights import Weights

_NOTHING = np.zeros(0, np.int64)

OnLost = Literal["continue", "raise"]
"""What a call does about receivers that left, once the others hold the version."""


def reasons(lost: Mapping[str, str]) -> str:
    """One text of `SyncStats.lost`; empty if nothing was lost."""
    return "; ".join(f"{who}: {why}" for who, why in lost.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats:
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
        parameters: Number of parameters that are "changed", "unchanged", or "frozen" (unchanged
            and not trained). They add up to all.
        payload_bytes: Bytes of all payloads as sent to each receiver, tables included.
        dense_bytes: Bytes of all values: what a dense sync sends.
        joined_bytes: Payload bytes of the full sync to joining receivers, besides the delta's.
        bytes_by_codec: `payload_bytes` by what took them: rows by their codecs ("gap+ulp", "raw",
            "dense"), "table" for what describes them, "zstd" and "none" for whole payloads.
        num_buckets: Payloads of the delta, or of the full sync.
        diff_s: Time to compare the source with the snapshot, digests included; of a delta that is
            packed meanwhile, the time that was waited for it.
        transfer_s: The rest, from the first frame until every receiver has prepared.
        commit_s: From the decision until every receiver has committed: the pause.
        receiver_commit_s: The longest time in which a receiver wrote and read back.
        total_s: The whole call.
        sender_bytes: Memory of the sync besides the snapshot: patches held and two buckets.
        receiver_bytes: The most memory that a receiver used for staging.
        snapshot_bytes: Size of the sender's snapshot.
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
    parameters: dict[str, int] = field(default_factory=dict)
    bytes_by_codec: dict[str, int] = field(default_factory=dict)

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


def judged(stats: SyncStats, on_lost: OnLost) -> SyncStats:
    """The same stats. Raises ReceiversLost if receivers left, and that is asked for."""
    if on_lost == "raise" and stats.lost:
        raise ReceiversLost(stats)
    return stats


@dataclass(slots=True)
class Synced:
    """The members' part of a sync."""

    delta: Delta | None = None
    result: RoundResult = field(default_factory=RoundResult)
    diff_s: float = 0.0


@dataclass(slots=True)
class Joined:
    """The newcomers' part of a sync."""

    joined: int = 0
    full_synced: int = 0
    result: RoundResult = field(default_factory=RoundResult)


def stats_of(
    weights: Weights,
    synced: Synced | None,
    joined: Joined,
    *,
    version: int,
    receivers: int,
    lost: Mapping[str, str],
    capture_s: float,
    total_s: float,
) -> SyncStats:
    """Count a sync.

    Args:
        weights: What was sent.
        synced: What members got; None if there were none.
        joined: What newcomers got.
        version, receivers, lost, total_s: As of `SyncStats`.
        capture_s: What the last snapshot took.
    """
    layout = weights.layout
    assert layout is not None
    found = synced.delta if synced else None
    result = synced.result if synced else joined.result
    full_numel = layout.numel if joined.full_synced else 0
    return SyncStats(
        version=version,
        base_version=found.base_version if found else None,
        kind="delta" if synced else "full",
        receivers=receivers,
        joined=joined.joined,
        full_synced=joined.full_synced,
        lost=dict(lost),
        numel=layout.numel,
        nnz=found.nnz if found else full_numel,
        parameters=weights.coverage(found.changed if found else _NOTHING, full=not found),
        payload_bytes=result.sent.payload_bytes,
        dense_bytes=layout.num_bytes,
        joined_bytes=joined.result.sent.payload_bytes if synced else 0,
        bytes_by_codec=dict(result.sent.bytes_by_codec),
        num_buckets=result.sent.num_buckets,
        diff_s=synced.diff_s if synced else capture_s,
        transfer_s=result.transfer_s,
        commit_s=result.commit_s,
        receiver_commit_s=result.receiver_commit_s,
        total_s=total_s,
        sender_bytes=(found.held_bytes if found else 0) + 2 * result.sent.bucket_bytes,
        receiver_bytes=max(result.receiver_bytes, joined.result.receiver_bytes),
        snapshot_bytes=weights.snapshot_bytes,
    )
