"""What the transports between processes of one host have in common: slots behind a unix socket.

Receivers map a slot and read it in place: packing into it is the only copy. A file descriptor comes
with the announcement of a slot's memory (SEGMENT).
"""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from deltasync.transports import forks
from deltasync.transports.base import Capabilities, Frame
from deltasync.transports.control.connection import Kind
from deltasync.transports.control.socket_file import check_user, listen, private_path
from deltasync.transports.slots import Slot, SlotReceiver, SlotSender


class UnixSender(SlotSender):
    """The sender's end: listens on a unix socket that only its own user may connect to."""

    def __init__(
        self, path: str | Path | None, slots: Sequence[Slot], *, max_payload_bytes: int | None
    ) -> None:
        """Listen on `path`, in a directory that exists; by default on a `private_path`.

        Payloads live where `slots` do. Only processes of this user, and of root, get in. The socket
        file of a sender that is dead is replaced. Raises ConfigError if another sender listens
        there or `path` is something else.
        """
        capabilities = Capabilities(
            (slots[0].memory.device.type,), max_payload_bytes, outlives_losses=True
        )
        self._path = private_path() if path is None else Path(path)
        listener, self._inode = listen(self._path)
        super().__init__(listener, slots, capabilities, admit=check_user)

    @property
    def path(self) -> Path:
        """The socket that receivers connect to."""
        return self._path

    def close(self) -> None:
        """Removes the socket file."""
        super().close()

    def _dispose(self) -> None:
        super()._dispose()
        with contextlib.suppress(FileNotFoundError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()


class UnixReceiver(SlotReceiver, ABC):
    """A receiver's end, less its memory."""

    def __init__(
        self, path: str | Path, device_type: str, *, max_payload_bytes: int | None
    ) -> None:
        """Connect to a sender that listens on `path`; larger segments are refused.

        So is a sender of another user, unless that is root.
        """
        self._path = Path(path)
        super().__init__(Capabilities((device_type,), max_payload_bytes), Kind.SEGMENT)

    @abstractmethod
    def receive(self, *, timeout_s: float) -> Frame:
        """The payload is the sender's memory, where it can be."""

    def _dial(self, timeout_s: float) -> socket.socket:
        sock = forks.new_socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)  # or a sender that does not accept would hold us up
            sock.connect(str(self._path))
            check_user(sock)
        except OSError:
            sock.close()
            raise
        return sock
