"""A peer is dropped by one thread while another closes the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltasync.transports import collective, shared_memory


@pytest.mark.parametrize("name", ["shared_memory", "collective"])
def test_dropping_peers_while_the_end_is_closed_raises_nothing(name: str, tmp_path: Path) -> None:
    """`close` ends what `drop` would: neither may take from under the other."""
    sender: shared_memory.Sender | collective.Sender
    receiver: shared_memory.Receiver | collective.Receiver
    if name == "shared_memory":
        sender = shared_memory.Sender(tmp_path / "socket")
        receiver = shared_memory.Receiver(tmp_path / "socket")
    else:
        sender = collective.Sender()
        receiver = collective.Receiver(*sender.address)
    with ThreadPoolExecutor(3) as threads:
        greeted = threads.submit(receiver.connect, b"hello", timeout_s=20)
        [(peer, _)] = sender.poll(timeout_s=20)
        greeted.result(20)
        disposing, dropped = threading.Event(), threading.Event()

        def dispose() -> None:
            disposing.set()
            assert not dropped.wait(0.3), "it is dropped while it is disposed of"
            sender._dispose()

        closed = threads.submit(sender._gate.close, dispose)
        assert disposing.wait(20)
        sender.drop(peer)
        dropped.set()
        closed.result(20)
        sender.drop(peer)
        sender.close()
        receiver.close()
