"""Communicators of NCCL."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deltasync.transports import nccl


@pytest.mark.gpu
def test_a_broadcast_ends_before_the_next_one_does() -> None:
    """One that nobody asked about before the next began, as a sender does that packs meanwhile."""
    device, options = torch.device("cuda:0"), dist.BroadcastOptions()
    options.timeout = timedelta(seconds=20)
    payload = torch.zeros(1, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    alone = nccl.Communicator(nccl.unique_id(), 0, 1, device)
    with torch.cuda.stream(stream):
        first = alone.broadcast([payload], options)
        alone.broadcast([payload], options)
        # Two seconds, for which the second would wait for a receiver if there were one.
        torch.cuda._sleep(int(2 * 2e9))  # type: ignore[no-untyped-call]
    end = time.monotonic() + 1
    while not first.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    assert first.is_completed()
    assert not stream.query()
    stream.synchronize()
    alone.abort()
