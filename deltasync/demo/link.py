"""Framed messages between the trainer and the rollout process, over a socket pair.

A message is a length-prefixed JSON header, then the bytes of its arrays. Prompts, rollouts and
rewards travel here; the weights do not: deltasync moves them.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_HEADER_BYTES: Final = 1 << 16
MAX_ARRAY_BYTES: Final = 1 << 28
DTYPES: Final[dict[str, np.dtype[Any]]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}

Array = NDArray[np.int64] | NDArray[np.float32]


class LinkError(Exception):
    """The bytes that arrived are not a message."""


class LinkClosed(LinkError):
    """The other process is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    """What travels.

    Attributes:
        kind: The kind of request or answer.
        values: Small JSON values by name.
        arrays: int64 and float32 arrays by name.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


class Link:
    """One end of the link. Owns `connection` and closes it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        """Raises LinkClosed if the other process is gone."""
        shapes = {name: [a.dtype.name, list(a.shape)] for name, a in message.arrays.items()}
        fields = {"kind": message.kind, "values": message.values, "arrays": shapes}
        header = json.dumps(fields).encode("ascii")
        data = [a.astype(DTYPES[a.dtype.name]).tobytes() for a in message.arrays.values()]
        try:
            self._connection.sendall(b"".join([struct.pack("<I", len(header)), header, *data]))
        except OSError as error:
            raise LinkClosed("the other process is gone") from error

    def receive(self) -> Message:
        """Return the next message. Raises LinkClosed if there is none, LinkError if it is bad."""
        (header_bytes,) = struct.unpack("<I", self._read(4))
        if header_bytes > MAX_HEADER_BYTES:
            raise LinkError(f"a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES}")
        match _parse(self._read(header_bytes)):
            case {"kind": str(kind), "values": dict(values), "arrays": dict(specs)}:
                arrays = {name: self._read_array(spec) for name, spec in specs.items()}
                return Message(kind, values, arrays)
            case _:
                raise LinkError("a header without kind, values and arrays")

    def request(self, message: Message) -> Message:
        """Send `message` and wait for the answer."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """Close the link; the other end then raises LinkClosed. Idempotent."""
        self._connection.close()

    def _read_array(self, spec: object) -> Array:
        match spec:
            case [str(name), list(shape)] if name in DTYPES and all(map(_is_size, shape)):
                num_bytes = math.prod(shape) * DTYPES[name].itemsize
            case _:
                raise LinkError(f"not an array: {spec}")
        if num_bytes > MAX_ARRAY_BYTES:
            raise LinkError(f"an array of {num_bytes} bytes; at most {MAX_ARRAY_BYTES}")
        array: Array = np.frombuffer(self._read(num_bytes), DTYPES[name]).reshape(shape)
        return array

    def _read(self, num_bytes: int) -> bytearray:
        """Exactly `num_bytes`, in memory that the caller owns."""
        data = bytearray()
        while len(data) < num_bytes:
            try:
                chunk = self._connection.recv(min(num_bytes - len(data), 1 << 20))
            except OSError as error:
                raise LinkClosed("the other process is gone") from error
            if not chunk:
                raise LinkClosed("the other process is gone")
            data += chunk
        return data


def _parse(data: bytearray) -> object:
    try:
        return json.loads(data)
    except ValueError as error:  # covers bad UTF-8 as well
        raise LinkError("a header that is not JSON") from error


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0
