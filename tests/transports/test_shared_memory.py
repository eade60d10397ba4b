"""The shared memory transport keeps the contract, and leaves nothing behind."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from deltasync.errors import ConfigError, PeerLost
from deltasync.testing.links import PATIENCE_S, PROMPT_S, Ends, Link, within
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.transports.shared_memory import Receiver, Sender
from tests.transports.slot_contract import MEMORY_BYTES, Liar, SlotContract, num_descriptors


class Memfd:
    """Sealed memory, as the slots of a sender are."""

    def __init__(self, num_bytes: int, seals: int) -> None:
        self._descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, num_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)

    @contextmanager
    def announced(self) -> Iterator[tuple[bytes, int]]:
        yield b"", self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class TestSharedMemory(SlotContract):
    def ends(self, tmp_path: Path) -> Ends:
        path = tmp_path / "socket"
        return Ends(partial(Sender, path), partial(Receiver, path), crosses_processes=True)

    def memory(self) -> Memfd:
        return Memfd(MEMORY_BYTES, SEALS)

    def num_held(self) -> int:
        return num_descriptors("/memfd:")

    def test_who_writes_to_a_payload_harms_nobody_else(self, link: Link) -> None:
        link.add(2)
        link.open()
        buffer = link.sender.buffer(1000, timeout_s=PATIENCE_S)
        received = link.receive_later()
        link.sender.send(Frame(b"x", buffer.fill_(2)), timeout_s=PATIENCE_S)
        first, second = (future.result(PATIENCE_S) for future in received)
        assert first.payload is not None
        assert second.payload is not None
        first.payload.fill_(3)  # against the rules
        assert int(second.payload[0]) == int(buffer[0]) == 2

    @pytest.mark.parametrize(
        ("num_bytes", "seals"),
        [(4096, 0), (4096, fcntl.F_SEAL_GROW), (0, SEALS)],
        ids=["not sealed", "may shrink", "empty"],
    )
    def test_memory_that_is_no_slot_is_refused(
        self, liar: tuple[Liar, ReceiveTransport], num_bytes: int, seals: int
    ) -> None:
        with closing(Memfd(num_bytes, seals)) as memory:
            Liar(liar[0].connection, memory).announce(0, num_bytes)
        liar[0].frame(0, min(10, num_bytes))
        with within(PROMPT_S), pytest.raises(PeerLost):
            liar[1].receive(timeout_s=PATIENCE_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


# The socket file


@pytest.mark.promise(
    "Security",
    "On one host only processes of the same user, or of root, can connect.",
)
def test_only_the_user_may_connect(path: Path) -> None:
    with closing(Sender(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_the_socket_file_of_a_live_sender_is_left_alone(path: Path) -> None:
    with closing(Sender(path)) as sender, closing(Receiver(path)) as receiver:
        with pytest.raises(ConfigError, match="another sender"):
            Sender(path)
        receiver.connect(b"hello", timeout_s=PATIENCE_S)
        # The probe of the second sender came and went: it is no peer.
        assert [data for _, data in sender.poll(timeout_s=PATIENCE_S)] == [b"hello"]


@pytest.mark.parametrize(
    ("name", "why"), [("precious", "not a socket"), ("missing/socket", None), ("long" * 50, None)]
)
def test_paths_that_cannot_be_are_refused(tmp_path: Path, name: str, why: str | None) -> None:
    """Nothing but a stale socket is removed."""
    (tmp_path / "precious").write_text("precious")
    with pytest.raises(ConfigError, match=why):
        Sender(tmp_path / name)
    assert (tmp_path / "precious").read_text() == "precious"
