"""One sync as frames that go one way: into a file, or wherever nobody answers.

They are those of a sync between two processes, without what is negotiated there: `layout`, which
says what the weights are before, `begin`, each `bucket`, and `prepare`, which says what they are
after. docs/wire-format.md, section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deltasync.delta.bits import Live
from deltasync.delta.coding import Coding
from deltasync.delta.ledger import digest_text
from deltasync.delta.payloads import PayloadReader, check_begin
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import Plan
from deltasync.delta.staging import LiveWeights, Received
from deltasync.delta.tiles import Space
from deltasync.errors import ProtocolViolation, TruncatedFrame
from deltasync.sync.protocol.receiver_session import ReceiverSession
from deltasync.sync.protocol.round import Emitter
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import (
    Begin,
    Bucket,
    Layout,
    ParameterSpec,
    Prepare,
    Welcome,
    entries,
)


def one_way_frames(
    plan: Plan,
    specs: Sequence[ParameterSpec],
    *,
    stream_id: str,
    version: int,
    digest: int,
    compression: Coding = "none",
) -> Iterator[Frame]:
    """The frames of one sync, each made when it is asked for.

    A payload is host memory of its own. Nothing is decided: who calls tells the plan.

    Args:
        plan: What is sent. Its ledger is asked for last.
        specs: The layout.
        stream_id: The training run that the versions belong to.
        version: What the sync brings.
        digest: Of the plan's base version; of `version` itself, if the plan has none.
        compression: Of the payloads.
    """
    base = plan.base_version
    layout = Layout(
        stream_id=stream_id,
        version=version if base is None else base,
        parameters=entries(tuple(specs)),
        digest=digest_text(digest),
    )
    emitter = Emitter(plan, version, compression=compression, buffer=_host_memory)
    yield Frame(encode(layout))
    yield Frame(encode(emitter.begin(stream_id=stream_id, layout_hash=layout.hash, timeout_s=0.0)))
    for message, payload in emitter.frames():
        yield Frame(encode(message, payload_bytes=len(payload)), payload)
    yield Frame(encode(emitter.prepare(digest_text(plan.ledger.total))))


def _host_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


class OneWayReader:
    """Takes the frames of one sync in order; checks all that can be checked without weights.

    Args:
        flats_of: Returns the weights that a layout of the sync speaks of, by their number there:
            what a coded payload says depends on them. Without weights its values mean nothing.

    Attributes:
        layout: What the weights must be before; None until it has come.
        specs: Its parameters.
        live: Weights of these.
        begin: What the sync is; None until it has come.
        digest: Of what the weights must be after; None until all has come.
    """

    def __init__(
        self,
        *,
        flats_of: Callable[[tuple[ParameterSpec, ...]], Mapping[int, Live]] = lambda specs: {},
    ) -> None:
        self._flats_of = flats_of
        self._session = ReceiverSession("file")
        self._session.on("greeted")
        self.live = LiveWeights({}, Space(()))
        self._payloads = PayloadReader(self.live)
        self.layout: Layout | None = None
        self.specs: tuple[ParameterSpec, ...] = ()
        self.begin: Begin | None = None
        self.digest: str | None = None

    def take(self, frame: Frame) -> Received | None:
        """What a frame has of changes.

        Raises:
            WireError: The frame is damaged.
            SyncError: It is none that may come now.
        """
        arrived_bytes = 0 if frame.payload is None else len(frame.payload)
        message, _ = decode(frame.header, arrived_bytes=arrived_bytes)
        session = self._session
        match message:
            case Layout():
                session.on(message)
                self.layout, self.specs = message, message.specs()
                self.live = LiveWeights(self._flats_of(self.specs), Space(whole(self.specs)))
                self._payloads = PayloadReader(self.live)
            case Begin() if self.layout is not None and self.begin is None:
                # What a sender would have said before: whether a full sync follows.
                full = () if message.base_version is not None else (session.engine,)
                session.on(Welcome(full_sync=full))
                session.on(message)
                check_begin(message, self.live.space)
                self._payloads.begin(message)
                self.begin = message
            case Bucket():
                session.on(message)
                return self._payloads.read(message, frame.payload)
            case Prepare() if message.digest is not None:
                session.on(message)
                self.digest = message.digest
            case _:
                raise ProtocolViolation(f"{message.kind} has no place here in frames of one way")
        return None

    def whole_digest(self) -> str:
        """`digest`, of all that has come. Raises TruncatedFrame if there is more to come."""
        if self.digest is None:
            raise TruncatedFrame("the frames end before `prepare`: a part is missing")
        return self.digest

    def read(self, frames: Iterable[Frame]) -> Iterator[Received]:
        """The buckets of the sync, one after another; `digest` is there after the last."""
        for frame in frames:
            if (bucket := self.take(frame)) is not None:
                yield bucket
        self.whole_digest()
