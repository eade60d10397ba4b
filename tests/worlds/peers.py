"""A sender by hand: what it says, legal unless told otherwise, and who hears it; and receivers
that lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import (
    DeltaSyncError,
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    WeightReceiver,
    WeightSender,
    dtypes,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import TransportTimeout
from deltasync.testing.links import send_copy
from deltasync.transports import inprocess
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import FORMAT_VERSION, decode, encode, join_header
from deltasync.wire.messages import (
    Begin,
    Bucket,
    Commit,
    Hello,
    Layout,
    Message,
    ParameterSpec,
    Prepare,
    Welcome,
    entries,
    layout_hash,
)
from tests.wire import reference
from tests.wire.reference import Tile
from tests.worlds.links import AMPLE_S, Model, Serving, ThroughReceiver, Wrap, bits_equal

SPECS = (
    ParameterSpec(("a",), (8, 5), dtypes.BY_NAME["bfloat16"]),
    ParameterSpec(("b",), (30,), dtypes.BY_NAME["float16"]),
    ParameterSpec(("c",), (3,), dtypes.BY_NAME["float32"]),
)
"""Of one tile each: 0, 1 and 2."""

HASH = layout_hash(SPECS)
STREAM, BASE, NEXT = "run", 5, 6
OPTIONS = ReceiverOptions(stall_timeout_s=0.02)


def model(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model(
        {
            "a": torch.randn(8, 5, generator=generator).bfloat16(),
            "b": torch.randn(30, generator=generator).half(),
            "c": torch.randn(3, generator=generator),
        }
    )


def hello(engine: str = "engine", rank: int = 0, world: int = 1, **fields: Any) -> Hello:
    """A greeting of a receiver that holds what `SPECS` says."""
    legal: dict[str, Any] = {
        "format_versions": (FORMAT_VERSION,),
        "parameters": entries(SPECS),
        "connection": None,
        "lanes": 0,
    }
    return Hello(engine=engine, rank=rank, world=world, **(legal | fields))


# What a sender may say. Everything is legal unless the fields given make it not.


def layout(**fields: Any) -> Layout:
    legal: dict[str, Any] = {
        "stream_id": STREAM,
        "version": BASE,
        "digest": "0" * 16,
        "parameters": entries(SPECS),
    }
    return Layout(**(legal | fields))


def welcome(*, full: bool = False) -> Welcome:
    return Welcome(full_sync=("engine",) if full else ())


def begin(**fields: Any) -> Begin:
    legal: dict[str, Any] = {
        "stream_id": STREAM,
        "version": NEXT,
        "base_version": BASE,
        "layout_hash": HASH,
        "payload_bytes": 300,
        "places": 20,
        "timeout_s": 0.0,
        "attempt": 1,
    }
    return Begin(**(legal | fields))


def said(message: Message, **fields: Any) -> Frame:
    """A message, with fields that the model would not take."""
    data = json.loads(message.model_dump_json()) | fields
    return Frame(join_header(json.dumps(data).encode()))


SPARSE = Tile(0, (1, 4, 9), (0x4141,) * 3)
DENSE = Tile(1, None, (0x4141,) * 30)
"""Changes of "a" and of "b"."""


def tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def frame(message: Message, data: bytes) -> Frame:
    return Frame(encode(message, payload_bytes=len(data)), tensor(data))


def bucket(*tiles: Tile, data: bytes | None = None, item_size: int = 2, **fields: Any) -> Frame:
    """A payload of these changes, or other bytes in its place."""
    data = reference.payload(tiles, item_size) if data is None else data
    legal: dict[str, Any] = {
        "version": NEXT,
        "sequence": 0,
        **reference.sizes(tiles or (SPARSE, DENSE), item_size),
        "compression": "none",
    }
    return frame(Bucket(**(legal | fields)), data)


def zipped(data: bytes, **fields: Any) -> Frame:
    """The same bytes as a payload that is said to be a zstd frame."""
    return bucket(data=data, compression="zstd", **fields)


def prepare(num_buckets: int = 1, version: int = NEXT, digest: str | None = None) -> Prepare:
    return Prepare(version=version, num_buckets=num_buckets, digest=digest)


def commit(version: int = NEXT) -> Commit:
    return Commit(version=version)


Said = Message | Frame
JOINED: list[Said] = [layout(), welcome()]
STAGED: list[Said] = [*JOINED, begin(), bucket(SPARSE, DENSE)]


class Hand:
    """A sender by hand, and the receiver that hears it in the same thread."""

    def __init__(
        self,
        options: ReceiverOptions = OPTIONS,
        *,
        world: int = 1,
        device: str = "cpu",
        wrap: Wrap = lambda link: link,
    ) -> None:
        self.transport = inprocess.Sender()
        self.module = model().to(device)
        self.before = [as_bits(parameter.data).clone() for parameter in self.module.parameters()]
        self.receiver = WeightReceiver(
            ModuleTarget(self.module), wrap(self.transport.receiver()), options=options, world=world
        )
        self.peer = -1

    def say(self, messages: Iterable[Said]) -> DeltaSyncError:
        """Let the receiver greet, say all of it, and return the first error."""
        with pytest.raises(TransportTimeout):
            self.receiver.stage(timeout_s=0)
        [(self.peer, hello)] = self.transport.poll(timeout_s=0)
        assert isinstance(decode(hello)[0], Hello)
        assert not self.transport.open_epoch([self.peer], timeout_s=0)
        for message in messages:
            sent = message if isinstance(message, Frame) else Frame(encode(message))
            send_copy(self.transport, sent, timeout_s=0)
        while True:
            try:
                self.receiver.receive_weights(timeout_s=0)
            except DeltaSyncError as error:
                return error

    def replies(self) -> list[Message]:
        """All that the receiver answered until it hung up or has nothing more to say."""
        found: list[Message] = []
        while isinstance(reply := self.transport.collect_replies(timeout_s=0)[self.peer], bytes):
            found.append(decode(reply)[0])
        return found

    def is_untouched(self) -> bool:
        now = [as_bits(parameter.data) for parameter in self.module.parameters()]
        return all(torch.equal(a, b) for a, b in zip(self.before, now, strict=True))

    def serve_honestly(self) -> None:
        """The same receiver joins a real sender over the same transport and follows it."""
        source = model(7)
        sender = WeightSender(ModuleSource(source), self.transport)
        serving = Serving(self.receiver).start()
        try:
            for _ in range(2):
                sender.wait_for_receivers(1, timeout_s=AMPLE_S)
                sender.send_weights(timeout_s=AMPLE_S)
                as_bits(source.get_parameter("a").data)[1, 1] ^= 1
            sender.send_weights(timeout_s=AMPLE_S)
            assert bits_equal(source, self.module)
            assert not self.receiver.is_dirty
        finally:
            serving.stop()
            sender.close()


Tamper = Callable[[Any], list[Message | bytes]]


class Liar(ThroughReceiver):
    """A receiver's link that says something else, once, for one kind of message."""

    def __init__(self, inner: ReceiveTransport, kind: str, tamper: Tamper) -> None:
        super().__init__(inner)
        self._kind, self._tamper = kind, tamper

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        for data in self._tampered(greeting):
            self._inner.connect(data, timeout_s=timeout_s)

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        for each in self._tampered(data):
            self._inner.reply(each, timeout_s=timeout_s)

    def _tampered(self, data: bytes) -> list[bytes]:
        message = decode(data)[0]
        if message.kind != self._kind:
            return [data]
        self._kind = ""
        return [m if isinstance(m, bytes) else encode(m) for m in self._tamper(message)]


def with_(**fields: Any) -> Tamper:
    """The same message with other fields, legal ones or not."""

    def tamper(message: Message) -> list[Message | bytes]:
        return [said(message, **fields).header]

    return tamper
