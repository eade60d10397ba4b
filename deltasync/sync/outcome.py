"""What came of a call of `send_weights`, and how it is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltasync.delta.backend import Delta
from deltasync.sync.protocol.round import RoundResult
from deltasync.sync.source.weights import Weights
from deltasync.sync.stats import SyncStats


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
        parameters=weights.coverage(found.changed if found else (), full=not found),
        payload_bytes=result.sent.payload_bytes,
        dense_bytes=layout.num_bytes,
        joined_bytes=joined.result.sent.payload_bytes if synced else 0,
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
