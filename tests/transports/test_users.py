"""Other users of the host: they are served nothing, give nothing, and hold nothing up."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deltasync.errors import ConfigError, TransportTimeout
from deltasync.testing.links import PATIENCE_S
from deltasync.testing.processes import Child
from deltasync.transports import shared_memory
from deltasync.transports.control.connection import Kind
from deltasync.transports.control.socket_file import private_path
from tests.worlds.links import until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
SOMEBODY = 65534
LISTENERS: list[socket.socket] = []
GREETING = struct.pack("<2sBxI", b"dS", Kind.GREETING, 5) + b"hello"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which everybody may make files, as /tmp is."""
    with TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def as_somebody(act: Callable[[Path], None], folder: Path) -> None:
    """For a process of its own: be another user, `act`, and live until killed."""
    os.setgroups([])
    os.setgid(SOMEBODY)
    os.setuid(SOMEBODY)
    act(folder)
    (folder / "done").touch()
    time.sleep(60)


def listen_first(folder: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "weights"))
    (folder / "weights").chmod(0o666)
    listener.listen()
    (folder / "listens").touch()
    sock, _ = listener.accept()
    assert sock.recv(100) == b"", "a receiver spoke to another user"
    LISTENERS.append(listener)  # it goes on


def greet(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(folder / "weights"))
        try:
            sock.sendall(GREETING)
            assert sock.recv(100) == b""
        except ConnectionError:
            pass


@pytest.mark.promise(
    "Security",
    "On one host only processes of the same user, or of root, can connect.",
)
@as_root
def test_a_receiver_takes_nothing_from_another_user(shared: Path) -> None:
    with Child(as_somebody, listen_first, shared):
        until((shared / "listens").exists)
        with closing(shared_memory.Receiver(shared / "weights")) as receiver:
            with pytest.raises(TransportTimeout, match=f"user {SOMEBODY}"):
                receiver.connect(b"hello", timeout_s=1)
            until((shared / "done").exists)


@pytest.mark.promise(
    "Security",
    "On one host only processes of the same user, or of root, can connect.",
)
@as_root
def test_a_sender_lets_no_other_user_in(shared: Path) -> None:
    with closing(shared_memory.Sender(shared / "weights")) as sender:
        sender.path.chmod(0o666)  # as if its mode did not keep others out
        with Child(as_somebody, greet, shared) as child:
            while not (shared / "done").exists():
                assert child.is_alive, child.traceback
                assert sender.poll(timeout_s=0.05) == []
        with closing(shared_memory.Receiver(sender.path)) as receiver:
            receiver.connect(b"mine", timeout_s=PATIENCE_S)
            assert [data for _, data in sender.poll(timeout_s=PATIENCE_S)] == [b"mine"]


@pytest.mark.promise(
    "Security",
    "On one host only processes of the same user, or of root, can connect.",
)
def test_ends_meet_on_a_private_path_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        closing(shared_memory.Sender()) as sender,
        closing(shared_memory.Receiver(sender.path)) as receiver,
    ):
        assert sender.path.parent == tmp_path / f"deltasync-{os.geteuid()}"
        assert stat.S_IMODE(sender.path.parent.stat().st_mode) == 0o700
        receiver.connect(b"hello", timeout_s=PATIENCE_S)
        assert [data for _, data in sender.poll(timeout_s=PATIENCE_S)] == [b"hello"]
    assert private_path("name") == private_path("name")


OF_SOMEBODY = pytest.param("somebody's", f"belongs to user {SOMEBODY}", marks=as_root)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(0o755, "not 0700"), (0o770, "not 0700"), ("link", "not a directory"), OF_SOMEBODY],
)
def test_a_directory_that_is_not_private_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int | str, why: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"deltasync-{os.geteuid()}"
    if kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(kind if isinstance(kind, int) else 0o700)
    if kind == "somebody's":
        os.chown(folder, SOMEBODY, SOMEBODY)
    with pytest.raises(ConfigError, match=why):
        private_path()
