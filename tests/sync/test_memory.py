"""A receiver without host memory: it serves what it held, says why, and recovers."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    StagingThread,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import SyncAborted
from deltasync.testing.processes import Child
from tests.worlds.links import Model, until
from tests.worlds.mortals import connect, fingerprint, listen

NUMEL = 16 << 20
MARGIN_BYTES = 12 << 20


def model() -> Model:
    return Model({"w": torch.zeros(NUMEL, dtype=torch.bfloat16)})


@contextmanager
def no_more_memory() -> Iterator[None]:
    """The address space of this process cannot grow by more than the margin."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MARGIN_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def serve(kind: str, folder: str) -> None:
    replica = model()
    options = ReceiverOptions(max_staged_bytes=1 << 30)
    receiver = WeightReceiver(ModuleTarget(replica), connect(kind, folder), options=options)
    with StagingThread(receiver) as staging:
        until(lambda: staging.wait_staged(timeout_s=1))
        assert staging.commit() == 2
        held = fingerprint(replica)
        with no_more_memory():
            Path(folder, "lacking").touch()
            until(Path(folder, "aborted").exists)
            assert not staging.is_staged()
            until(lambda: staging.last_error is not None)  # the trainer has heard of it first
            receiver.check_serving()
        assert fingerprint(replica) == held
        Path(folder, "recovered").touch()
        until(lambda: staging.wait_staged(timeout_s=1))
        staging.commit()
        Path(folder, "holds").write_text(fingerprint(replica))
    receiver.close()


@pytest.mark.promise("Cost", "A lack of host memory fails a sync, not the receiver.")
@pytest.mark.parametrize("kind", ["shared_memory", "collective"])
def test_a_staging_thread_outlives_a_lack_of_host_memory(kind: str, tmp_path: Path) -> None:
    source = model()
    bits = as_bits(source.get_parameter("w").data)
    with (
        WeightSender(ModuleSource(source), listen(kind, str(tmp_path))) as sender,
        Child(serve, kind, str(tmp_path)) as child,
    ):
        sender.wait_for_receivers(1, timeout_s=60)
        sender.send_weights(timeout_s=30)  # which joins by digest
        bits[7] += 1
        sender.send_weights(timeout_s=30)
        come(child, tmp_path / "lacking")
        bits += 1
        with pytest.raises(SyncAborted):
            sender.send_weights(timeout_s=60)
        Path(tmp_path, "aborted").touch()
        come(child, tmp_path / "recovered")
        sender.wait_for_receivers(1, timeout_s=30)
        assert sender.send_weights(timeout_s=30).receivers == 1
        child.wait(timeout_s=30)
        assert Path(tmp_path, "holds").read_text() == fingerprint(source)


def come(child: Child, path: Path) -> None:
    """Wait for what the child makes."""
    until(lambda: child.traceback is not None or path.exists())
    assert not child.traceback, child.traceback
