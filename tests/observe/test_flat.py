"""Events as flat dictionaries: names that stay, numbers that are floats."""

from __future__ import annotations

import re

import pytest

from deltasync.errors import SyncAborted
from deltasync.observe.flat import flat
from deltasync.sync.events import SyncEvent
from tests.observe.made import failed, published, received, sync

SYNC_NAMES = [
    "attempts",
    "base_version",
    "bytes_by_codec/gap_ulp",
    "bytes_by_codec/table",
    "commit_s",
    "dense_bytes",
    "density",
    "diff_s",
    "engines",
    "failed",
    "full_synced",
    "joined",
    "joined_bytes",
    "lost",
    "nnz",
    "num_buckets",
    "numel",
    "parameters/changed",
    "parameters/frozen",
    "parameters/unchanged",
    "payload_bytes",
    "receiver_bytes",
    "receiver_commit_s",
    "receivers",
    "sender_bytes",
    "snapshot_bytes",
    "total_s",
    "transfer_s",
    "version",
    "wait_s",
    "warnings",
]


def test_names_of_a_sync_are_stable() -> None:
    found = flat(sync())
    assert sorted(found) == [f"deltasync/{name}" for name in SYNC_NAMES]
    assert found["deltasync/commit_s"] == 0.001
    assert found["deltasync/density"] == 0.01
    assert found["deltasync/bytes_by_codec/gap_ulp"] == 500
    assert found["deltasync/engines"] == 2


@pytest.mark.parametrize(
    "event",
    [sync(), received(), published(), failed(), SyncAborted("x"), sync(density_by={"a b\n": 0.5})],
    ids=lambda event: type(event).__name__,
)
def test_everything_is_a_float_under_a_name_that_tensorboard_keeps(
    event: SyncEvent | SyncAborted,
) -> None:
    found = flat(event, prefix="sync/")
    assert found
    for name, number in found.items():
        assert type(number) is float
        assert re.fullmatch(r"sync/[-/\w.]+", name, re.ASCII)


def test_failures_are_told_from_successes() -> None:
    assert flat(sync())["deltasync/failed"] == 0.0
    assert flat(received())["deltasync/failed"] == 0.0
    assert flat(SyncAborted("x")) == {"deltasync/failed": 1.0}
    assert flat(failed(lost={"a": "b"}, total_s=2.0)) == {
        "deltasync/failed": 1.0,
        "deltasync/lost": 1.0,
        "deltasync/total_s": 2.0,
    }
