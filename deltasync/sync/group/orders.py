"""The messages among a trainer's ranks: orders of rank 0, and the other ranks' answers.

They never leave the trainer, which is one program, so the wire format does not include them. They
are framed and checked like its messages; `wire.frame.encode` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
)

from deltasync.delta.shard import ShardSpec
from deltasync.errors import MalformedMessage
from deltasync.sync.protocol.round import SentBuckets
from deltasync.sync.source.layout import source_specs
from deltasync.sync.source.tensors import NamedTensor, Place, held_of, maxima_of
from deltasync.sync.stats import SyncStats
from deltasync.transports.address import Address
from deltasync.wire import frame
from deltasync.wire.messages import (
    ConnectionId,
    Count,
    Digest,
    Entry,
    Failed,
    ParameterSpec,
    Seconds,
    Text,
    Version,
    entries,
    parameter_specs,
)

Dims = Annotated[tuple[Count, ...], FailFast()]
CopyRuns = Annotated[tuple[tuple[Count, Count], ...], FailFast()]
"""(number of parameters, copies of each): runs of parameters that follow each other."""

Alike = Annotated[tuple[tuple[str, Digest], ...], FailFast()]
"""(name of a parameter, digest of what a rank holds of it)."""


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Here(_Said):
    """A rank has connected.

    `capture` names the capture that its snapshot comes from, if it has one. `address` is the
    address that it sends from, if its transport has one.
    """

    kind: Literal["here"] = "here"
    rank: Count
    world: Count
    capture: ConnectionId | None
    address: Address | None


class _Order(_Said):
    """Rank 0's link sets the number of the call of `send_weights`, which every rank counts, and the
    version that receivers hold: what was sent last is decided if it leads there.
    """

    call: Count = 0
    version: Version = 0


class Declare(_Order):
    """Declare what this rank holds."""

    kind: Literal["declare"] = "declare"


class Declared(_Said):
    """Names, shapes and dtypes of tensors in their source, and for each what is held of it.

    `held` has the shape, offset and size of each `ShardSpec`, `maxima` the columns of each `Place`.
    """

    kind: Literal["declared"] = "declared"
    parameters: Annotated[tuple[Entry, ...], FailFast()]
    held: Annotated[tuple[tuple[Dims, Dims, Dims], ...], FailFast()]
    maxima: Annotated[tuple[tuple[str, Count, Count, Count, bool], ...], FailFast()]

    @classmethod
    def of(cls, tensors: Sequence[NamedTensor]) -> Self:
        """What a source has. Raises ConfigError for tensors that cannot be sent."""
        boxes = [held_of(entry)[0] for entry in tensors]
        return cls(
            parameters=entries(source_specs(tensors)),
            held=tuple((box.shape, box.offset, box.size) for box in boxes),
            maxima=tuple(astuple(one.place) for one in maxima_of(tensors).values()),
        )

    @cached_property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """The tensors. Raises WireError."""
        return parameter_specs(self.parameters)

    @cached_property
    def boxes(self) -> dict[str, ShardSpec]:
        """What is held of each, by canonical name. Raises WireError, ConfigError."""
        if len(self.held) != len(self.specs):
            raise MalformedMessage("not one box for each parameter")
        return {spec.name: ShardSpec(*box) for spec, box in zip(self.specs, self.held, strict=True)}

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """What is known of maxima."""
        return tuple(Place(*one) for one in self.maxima)


class Measure(_Order):
    """Report maxima of the weights as they are now: (name, size), or those of the last time.

    The answer has those that the rank knows something of, in the order in which it has declared
    them; `agreed` of later orders has all, in the order of `maxima`. Both are words of two bytes,
    the bits of bfloat16, as base64.
    """

    kind: Literal["measure"] = "measure"
    maxima: tuple[tuple[str, Count], ...] | None


class Measured(_Said):
    """What an order to measure has asked for."""

    kind: Literal["measured"] = "measured"
    found: str


class Capture(_Order):
    """Take a snapshot of the weights as they are now.

    From now on a rank sends what it holds, with two exceptions, listed by rank: of each parameter
    in `shares` it sends only a box, given as (parameter number, offset, size), and it sends nothing
    of the parameters that have two copies in `alike`. Those that have one or two, others hold too.
    """

    kind: Literal["capture"] = "capture"
    capture: ConnectionId
    parameters: Annotated[tuple[Entry, ...], FailFast()]
    shares: Annotated[tuple[tuple[tuple[Count, Dims, Dims], ...], ...], FailFast()]
    alike: Annotated[tuple[CopyRuns, ...], FailFast()]
    agreed: str


class Ask(_Order):
    """Report digests of the snapshot: of all of it, and for these copies of each parameter."""

    kind: Literal["ask"] = "ask"
    copies: Annotated[tuple[CopyRuns, ...], FailFast()]


class Found(_Said):
    """What a rank has to send: all of the snapshot, or what differs from it.

    `digests` are those of the snapshot, with the copies that were asked for. Of what differs, a
    parameter has a copy in `changed` if it does. `alike` has what others hold too, or a part of it.
    """

    kind: Literal["found"] = "found"
    payload_bytes: Count
    places: Count
    alike: Alike = ()
    digests: tuple[Digest, ...] = ()
    nnz: Count = 0
    changed: CopyRuns = ()


class Compare(_Order):
    """Compare the weights with the version that receivers hold."""

    kind: Literal["compare"] = "compare"
    agreed: str


class Send(_Order):
    """Send what differs, as the next version, or all of the snapshot, to these receivers.

    They are told of its shares first, `with_shares`, if a decided version has not told them. The
    answer reports the digests that receivers will have, for `copies` as in `Ask`.
    """

    kind: Literal["send"] = "send"
    attempt: Count
    is_delta: bool
    receivers: tuple[ConnectionId, ...]
    with_shares: bool
    timeout_s: Seconds
    copies: Annotated[tuple[CopyRuns, ...], FailFast()]


class Sent(_Said):
    """It is sent, and a receiver that holds all of it has these digests.

    If `buckets.lost` names receivers, it was not sent to all, and there are no digests.
    """

    kind: Literal["sent"] = "sent"
    digests: tuple[Digest, ...]
    buckets: SentBuckets


class Done(_Order):
    """The call has ended. Not answered. If `stats` is None, `error` says why."""

    kind: Literal["done"] = "done"
    stats: SyncStats | None
    error: Text


Order = Declare | Measure | Capture | Ask | Compare | Send | Done
Answer = Declared | Measured | Found | Sent | Failed
Said = Here | Order | Answer
_SAID: TypeAdapter[Said] = TypeAdapter(Annotated[Said, Field(discriminator="kind")])


def decode(header: bytes) -> Said:
    """The message of a header. Raises WireError."""
    data, _ = frame.split_header(header, max_payload_bytes=0)
    try:
        return _SAID.validate_json(data)
    except ValidationError as error:
        raise MalformedMessage(f"no message among ranks: {error.error_count()} faults") from error


def runs_of(copies: NDArray[np.uint64]) -> CopyRuns:
    """uint64[parameters] as runs."""
    begins = np.flatnonzero(np.diff(copies, prepend=~copies[:1]))
    lengths = np.diff(begins, append=len(copies))
    return tuple(zip(lengths.tolist(), copies[begins].tolist(), strict=True))


def copies_of(runs: CopyRuns, num_parameters: int) -> NDArray[np.uint64]:
    """uint64[num_parameters]. Raises MalformedMessage for runs of more or fewer."""
    counts, values = zip(*runs, strict=True) if runs else ((), ())
    if sum(counts) != num_parameters:
        raise MalformedMessage(f"copies of {sum(counts)} parameters, there are {num_parameters}")
    return np.repeat(np.array(values, np.uint64), np.array(counts, np.int64))
