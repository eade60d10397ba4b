"""What the ranks of a trainer say to each other: orders of the one that speaks for all, answers.

They never leave the trainer, which is one program: so they are no part of the wire format, but are
framed and checked like it. `wire.frame.encode` writes them.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from deltasync.errors import MalformedMessage
from deltasync.sync.protocol.frames import SentBuckets
from deltasync.sync.stats import SyncStats
from deltasync.transports.address import Address
from deltasync.wire import frame
from deltasync.wire.messages import ConnectionId, Count, Digest, Entry, Seconds, Text, Version

Dims = Annotated[tuple[Count, ...], FailFast()]
CopyRuns = Annotated[tuple[tuple[Count, Count], ...], FailFast()]
"""(parameters, copies of each): runs of neighbours."""


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Here(_Said):
    """A rank has connected.

    `capture` is that which its snapshot goes back to, if it has one; `address` is where it sends
    from, if that can be told.
    """

    kind: Literal["here"] = "here"
    rank: Count
    world: Count
    capture: ConnectionId | None
    address: Address | None


class _Order(_Said):
    call: Count  # of `send_weights`, which every rank counts


class Declare(_Order):
    """Say what you hold."""

    kind: Literal["declare"] = "declare"


class Declared(_Said):
    """Names, shapes and dtypes of tensors, of each what is held, and whether it is trained.

    That is the shape, offset and size of a `ShardSpec`.
    """

    kind: Literal["declared"] = "declared"
    parameters: Annotated[tuple[Entry, ...], FailFast()]
    boxes: Annotated[tuple[tuple[Dims, Dims, Dims], ...], FailFast()]
    trained: Annotated[tuple[bool, ...], FailFast()]


class Capture(_Order):
    """Start from your weights as they are.

    Send what you hold, for each rank: but of `shares` a part, (number, offset and size of the box
    to send), and nothing of `withheld`, parameters as in `CopyRuns`: so many to send, not to send.
    """

    kind: Literal["capture"] = "capture"
    capture: ConnectionId
    parameters: Annotated[tuple[Entry, ...], FailFast()]
    shares: Annotated[tuple[tuple[tuple[Count, Dims, Dims], ...], ...], FailFast()]
    withheld: Annotated[tuple[CopyRuns, ...], FailFast()]


class Ask(_Order):
    """Tell digests of the snapshot: of all of it, and of so many copies of each parameter."""

    kind: Literal["ask"] = "ask"
    copies: Annotated[tuple[CopyRuns, ...], FailFast()]


class SnapshotState(_Said):
    """Digests of what the snapshot holds; what all of it takes to send."""

    kind: Literal["snapshot"] = "snapshot"
    digests: tuple[Digest, ...]
    sparse_bytes: Count
    dense_bytes: Count
    snapshot_bytes: Count


class Compare(_Order):
    """Look what has changed since a version."""

    kind: Literal["compare"] = "compare"
    base_version: Version


class Compared(_Said):
    """What has. `changed` are parameters as in `CopyRuns`: so many that have not, that have."""

    kind: Literal["compared"] = "compared"
    sparse_bytes: Count
    dense_bytes: Count
    held_bytes: Count
    nnz: Count
    changed: CopyRuns


class Send(_Order):
    """Send that, or all of the snapshot if `base_version` is None, to these receivers.

    Digests that receivers would arrive at are told as in `Ask`.
    """

    kind: Literal["send"] = "send"
    attempt: Count
    version: Version
    base_version: Version | None
    receivers: tuple[ConnectionId, ...]
    timeout_s: Seconds
    copies: Annotated[tuple[CopyRuns, ...], FailFast()]


class Sent(_Said):
    """It is sent, and receivers that hold all of it have these digests.

    If `buckets.lost` names receivers, it was not sent to all, and there are no digests.
    """

    kind: Literal["sent"] = "sent"
    digests: tuple[Digest, ...]
    buckets: SentBuckets


class Decide(_Order):
    """What was sent is a version that receivers hold. Not answered."""

    kind: Literal["decide"] = "decide"
    version: Version


class Done(_Order):
    """The call is over. Not answered. Without stats `error` says why."""

    kind: Literal["done"] = "done"
    version: Version
    stats: SyncStats | None
    error: Text


class Failed(_Said):
    """A rank could not do what was ordered."""

    kind: Literal["failed"] = "failed"
    error: Text
    reason: Text


Order = Declare | Capture | Ask | Compare | Send | Decide | Done
Answer = Declared | SnapshotState | Compared | Sent | Failed
Said = Here | Order | Answer
_SAID: TypeAdapter[Said] = TypeAdapter(Annotated[Said, Field(discriminator="kind")])


def decode(header: bytes) -> Said:
    """What a header says. Raises WireError."""
    data, _ = frame.split_header(header, max_payload_bytes=0)
    try:
        return _SAID.validate_json(data)
    except ValidationError as error:
        raise MalformedMessage(f"no word among ranks: {error.error_count()} faults") from error


def runs_of(copies: NDArray[np.uint64]) -> CopyRuns:
    """uint64[parameters] as runs."""
    return tuple((len(list(run)), value) for value, run in groupby(copies.tolist()))


def copies_of(runs: CopyRuns) -> NDArray[np.uint64]:
    """uint64[parameters]."""
    counts, values = zip(*runs, strict=True) if runs else ((), ())
    return np.repeat(np.array(values, np.uint64), np.array(counts, np.int64))
