"""Events as ends make them, without an end."""

from __future__ import annotations

import dataclasses
from typing import Any

from deltasync import SyncStats
from deltasync.errors import SyncAborted
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, SyncFailed

_SYNC = SyncStats(
    version=2,
    base_version=1,
    kind="delta",
    receivers=2,
    numel=1000,
    nnz=10,
    payload_bytes=600,
    dense_bytes=2000,
    diff_s=0.003,
    transfer_s=0.002,
    commit_s=0.001,
    receiver_commit_s=0.0009,
    total_s=0.0075,
    sender_bytes=4096,
    receiver_bytes=600,
    snapshot_bytes=2000,
    bytes_by_codec={"zstd": 100, "gap": 500},
    changed=2,
    stream_id="run",
    engines=("a", "b"),
    ended_at=1.7e9,
    phases=(("compare", 0.0, 0.003), ("send", 0.003, 0.004), ("wait", 0.004, 0.005)),
)
_RECEIVED = ReceiveStats(
    name="a[0/1]",
    stream_id="run",
    version=2,
    base_version=1,
    kind="delta",
    num_bytes=600,
    staged_bytes=700,
    stage_s=0.002,
    commit_s=0.001,
    pause_s=0.0012,
    total_s=0.004,
    ended_at=1.7e9,
    phases=(("stage", 0.0, 0.002), ("commit", 0.003, 0.004)),
)
_PUBLISHED = PublishStats(
    version=2,
    base_version=1,
    kind="delta",
    digest=1 << 63,
    numel=1000,
    nnz=10,
    delta_bytes=600,
    anchor_bytes=2000,
    dense_bytes=2000,
    diff_s=0.003,
    upload_s=0.002,
    total_s=0.005,
    run="run",
    ended_at=1.7e9,
)


def sync(**changes: Any) -> SyncStats:
    return dataclasses.replace(_SYNC, **changes)


def received(**changes: Any) -> ReceiveStats:
    return dataclasses.replace(_RECEIVED, **changes)


def published(**changes: Any) -> PublishStats:
    return dataclasses.replace(_PUBLISHED, **changes)


def failed(error: BaseException | None = None, **changes: Any) -> SyncFailed:
    settings: dict[str, Any] = {"role": "sender", "version": 2, "ended_at": 1.7e9}
    return SyncFailed(error=error or SyncAborted("nobody took it"), **(settings | changes))
