"""Messages between the trainer and the rollout process: lines of JSON over a socket pair.

Prompts, rollouts and rewards travel here, as nested lists of numbers; deltasync moves the weights.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 1 << 28


class LinkError(Exception):
    """The bytes that arrived are not a message."""


class LinkClosed(LinkError):
    """The other process is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer.

    Attributes:
        kind: The kind of request or answer.
        values: JSON values by name. A float32 arrives as it was sent, bit for bit, but for a NaN.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)


class Link:
    """One end of the link. Owns `connection` and closes it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rb")

    def send(self, message: Message) -> None:
        """Raises LinkClosed if the other process is gone."""
        line = json.dumps({"kind": message.kind, "values": message.values}).encode() + b"\n"
        try:
            self._connection.sendall(line)
        except OSError as error:
            raise LinkClosed("the other process is gone") from error

    def receive(self) -> Message:
        """Return the next message. Raises LinkClosed if there is none, LinkError if it is bad."""
        try:
            line = self._lines.readline(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise LinkClosed("the other process is gone") from error
        if len(line) == MAX_MESSAGE_BYTES:
            raise LinkError(f"a message of {MAX_MESSAGE_BYTES} bytes or more")
        if not line.endswith(b"\n"):
            raise LinkClosed("the other process is gone")
        match _parse(line):
            case {"kind": str(kind), "values": dict(values)}:
                return Message(kind, values)
        raise LinkError("a message without kind and values")

    def request(self, message: Message) -> Message:
        """Send `message` and wait for the answer."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """Close the link; the other end then raises LinkClosed. Idempotent."""
        self._lines.close()
        self._connection.close()


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError as error:  # covers bad UTF-8 as well
        raise LinkError("a message that is not JSON") from error
