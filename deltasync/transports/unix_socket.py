"""What the transports between processes of one host have in common: slots behind a unix socket.

Receivers map a slot and read it in place: packing into it is the only copy. A file descriptor comes
with the announcement of a slot's memory (SEGMENT).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from deltasync.transports import forks
from deltasync.transports.control.connection import BrokenProtocol, Kind, Message
from deltasync.transports.control.socket_file import check_user, listen, private_path
from deltasync.transports.marks import Mark
from deltasync.transports.slots import Announcement, Slot, SlotReceiver, SlotSender


class UnixSender(SlotSender):
    """The sender's end: listens on a unix socket that only its own user may connect to.

    Attributes:
        path: The socket that receivers connect to.
    """

    def __init__(self, path: str | Path | None, slots: Sequence[Slot]) -> None:
        """Listen on `path`, in a directory that exists; by default on a `private_path`.

        Payloads live where `slots` do. Only processes of this user, and of root, get in. The socket
        file of a sender that is dead is replaced. Raises ConfigError if another sender listens
        there or `path` is something else.
        """
        self.path = private_path() if path is None else Path(path)
        listener, self._inode = listen(self.path)
        super().__init__(listener, slots, admit=check_user)

    def _dispose(self) -> None:
        super()._dispose()
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


class Segment:
    """Memory of the sender as it is mapped here: uint8[n], and the mark of what stands there."""

    def __init__(self, memory: Tensor, mark: Mark) -> None:
        self.memory, self.mark = memory, mark
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """The memory lasts no longer for a child."""
        self.memory = self.memory.new_empty(0)

    def close(self) -> None:
        """Unmap, after the reads that were enqueued here."""


class UnixReceiver(SlotReceiver):
    """A receiver's end, less what maps memory.

    Attributes:
        segment: Of a SEGMENT message: slot, bytes, and the handles of its memory.
    """

    segment: ClassVar[struct.Struct]

    def __init__(self, path: str | Path, device: torch.device) -> None:
        """Connect to a sender that listens on `path`.

        One of another user is refused, unless that is root.
        """
        self._path = Path(path)
        super().__init__(device, Kind.SEGMENT)
        self._segments: dict[int, Segment] = {}
        self._held: Announcement | None = None  # handed out
        self._releases: deque[tuple[Mark, Announcement]] = deque()  # let go of, maybe still read

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

    def _forget(self) -> None:
        """Unmap, after the reads that were enqueued, then close the connection."""
        self._held = None
        self._releases.clear()
        try:
            while self._segments:
                self._segments.popitem()[1].close()
        finally:
            super()._forget()

    def _take_back(self) -> None:
        """Mark where the reads of the last payload end on the current stream."""
        held, self._held = self._held, None
        if held is not None:
            self._releases.append((self._new_mark().set(), held))

    def _new_mark(self) -> Mark:
        return Mark(self.device)

    def progress(self) -> None:
        """Read nothing: payloads need no help, and the last one is unmapped with a lost sender."""
        with self._gate.entered():
            self._advance()

    def _advance(self) -> bool:
        """Release to the sender what nothing reads any more."""
        while self._releases and self._releases[0][0].is_done():
            self._release(self._releases.popleft()[1])
        return bool(self._releases)

    def _payload(self, told: Announcement) -> Tensor | None:
        segment = self._segments[told.slot]
        if not segment.mark.is_done():
            return None
        self._held = told
        return segment.memory[: told.num_bytes]

    def _map(self, slot: int, num_bytes: int, message: Message) -> None:
        assert message.descriptor is not None  # without one it is no SEGMENT
        if len(message.data) != self.segment.size:
            raise BrokenProtocol("a segment message of the wrong size")
        _, _, *handles = self.segment.unpack(message.data)
        if old := self._segments.pop(slot, None):
            old.close()
        self._segments[slot] = self._mapped(num_bytes, tuple(handles), message.descriptor)

    @abstractmethod
    def _mapped(self, num_bytes: int, handles: tuple[bytes, ...], descriptor: int) -> Segment:
        """Map memory, and own `descriptor`. Raises BrokenProtocol, TransportUnavailable."""
