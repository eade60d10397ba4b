"""Every message of a sync, as frozen models that refuse unknown fields.

docs/wire-format.md, section 2. `wire.frame` turns them into bytes and back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    model_validator,
)

from deltasync import dtypes
from deltasync.errors import ConfigError, UnknownDtype
from deltasync.wire.changes import Sizes
from deltasync.wire.compression import Compression

MAX_DIMENSIONS = 64
MAX_NUMEL = 1 << 62
MAX_WORLD = 1 << 16
MAX_NAME = 4096
MAX_ENGINE = 256  # characters of an engine's name
MAX_SHOWN = 80  # characters of a name that is refused

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Version = Annotated[int, Field(ge=0, lt=1 << 53)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=4096)]
StreamId = Annotated[str, Field(min_length=1, max_length=128)]
ConnectionId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Engine = Annotated[str, Field(min_length=1, max_length=MAX_ENGINE)]
Dimension = Annotated[int, Field(ge=0, le=MAX_NUMEL)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


def as_text(said: object) -> str:
    """What a `Text` takes of an error: its beginning, and escapes for what UTF-8 cannot write.

    File names are decoded so that they may hold such characters.
    """
    return str(said).encode(errors="backslashreplace").decode()[:4096]


# Lists stop at their first fault: a report on every element takes far more than the message.
Engines = Annotated[tuple[Engine, ...], FailFast()]
Entry = tuple[
    Annotated[tuple[Name, ...], Field(min_length=1), FailFast()],
    Annotated[tuple[Dimension, ...], Field(max_length=MAX_DIMENSIONS), FailFast()],
    Annotated[int, Field(ge=1, le=255)],
]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter in checkpoint coordinates.

    Attributes:
        names: Its canonical name, then the names tied to it.
        shape: The full checkpoint shape.
        dtype: The dtype of the wire.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: dtypes.Dtype

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def is_unicode(text: str) -> bool:
    """Whether a message can carry it: bytes of a command line or file name become surrogates."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def limit_broken(spec: ParameterSpec) -> str | None:
    """Return which limit of messages a parameter exceeds; None if it exceeds none."""
    for length in map(len, spec.names):
        if not 0 < length <= MAX_NAME:
            return f"its name has {length} characters, 1 to {MAX_NAME} can be sent"
    if not all(map(is_unicode, spec.names)):
        return "its name is no Unicode, since it has surrogates, and cannot be sent"
    if len(spec.shape) > MAX_DIMENSIONS:
        return f"{len(spec.shape)} dimensions, {MAX_DIMENSIONS} at most can be sent"
    if _extent(spec.shape) > MAX_NUMEL:
        return f"dimensions of {list(spec.shape)} without zeros multiply to more than {MAX_NUMEL}"
    return None


def check_limits(specs: Iterable[ParameterSpec]) -> None:
    """Raise ConfigError for a parameter that no message can carry."""
    for spec in specs:
        if (fault := limit_broken(spec)) is not None:
            raise ConfigError(f"{spec.name[:MAX_SHOWN]!r}: {fault}")


def _extent(shape: tuple[int, ...]) -> int:
    """The number of elements without dimensions of 0, from which strides are computed."""
    return math.prod(filter(None, shape))


def _checked(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    names = [name for entry in entries for name in entry[0]]
    if len(set(names)) != len(names):
        raise ValueError("a name stands twice in the layout")
    if any(_extent(shape) > MAX_NUMEL for _, shape, _ in entries):
        raise ValueError(f"a parameter of more than {MAX_NUMEL} elements, zeros aside")
    return entries


Entries = Annotated[tuple[Entry, ...], FailFast(), AfterValidator(_checked)]
"""The parameters of a hello or a layout."""


class _Parameters(_Message):
    parameters: Entries

    def specs(self) -> tuple[ParameterSpec, ...]:
        """The parameters in order. Raises UnknownDtype."""
        return parameter_specs(self.parameters)


def parameter_specs(entries: tuple[Entry, ...]) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a hello or a layout. Raises UnknownDtype."""
    return tuple(ParameterSpec(names, shape, _dtype(code)) for names, shape, code in entries)


def _dtype(code: int) -> dtypes.Dtype:
    try:
        return dtypes.BY_CODE[code]
    except KeyError:
        raise UnknownDtype(f"dtype code {code} is not one of {sorted(dtypes.BY_CODE)}") from None


class Hello(_Parameters):
    """A receiver reports its identity and what it holds.

    The other ranks of its trainer send over `lanes` further connections, each of which has been
    greeted with the same `connection`. Without such ranks `connection` is None and `lanes` 0.
    """

    kind: Literal["hello"] = "hello"
    engine: Engine
    rank: Count
    world: Annotated[int, Field(ge=1, le=MAX_WORLD)]
    format_versions: Annotated[tuple[int, ...], FailFast()]
    connection: ConnectionId | None
    lanes: Annotated[int, Field(ge=0, lt=MAX_WORLD)]

    @model_validator(mode="after")
    def _check_rank_and_lanes(self) -> Self:
        if self.rank >= self.world:
            raise ValueError(f"rank {self.rank} of {self.world}")
        if (self.connection is None) != (self.lanes == 0):
            raise ValueError("lanes and a connection go together")
        return self


class Lane(_Message):
    """Greets a rank that sends to the receiver whose greeting names the same connection."""

    kind: Literal["lane"] = "lane"
    connection: ConnectionId


class Layout(_Parameters):
    """The sender's parameters, in the order that numbers them, and the digest of `version`."""

    kind: Literal["layout"] = "layout"
    stream_id: StreamId
    version: Version
    digest: Digest

    @property
    def hash(self) -> str:
        """Its name in `begin`: SHA-256 of its entries as compact JSON, hexadecimal."""
        return _hash(self.parameters)


class Held(_Message):
    """The digest of what a receiver holds of the layout.

    `parts` are (number of a parameter, elements held of it), for parameters that are held in part.
    A receiver that left a write `half_written` needs a full sync, whatever its digest. It stages a
    sync that takes up to `max_staged_bytes`, and writes a larger one as it arrives.
    """

    kind: Literal["held"] = "held"
    digest: Digest
    parts: Annotated[tuple[tuple[Count, Count], ...], FailFast()]
    half_written: bool
    max_staged_bytes: Count


class Welcome(_Message):
    """The receiver is a member: now, or after a full sync if `full_sync` has its engine."""

    kind: Literal["welcome"] = "welcome"
    full_sync: Engines


class Upcoming(_Message):
    """A hint to members: the sender compares, and a sync to `version` may begin soon."""

    kind: Literal["upcoming"] = "upcoming"
    version: Version


class Begin(_Message):
    """A sync begins.

    It has the most bytes and places that may come, from which a receiver plans its memory, and how
    long the sender waits for receivers in each phase, so that a receiver does not give up while the
    sender waits for another.
    """

    kind: Literal["begin"] = "begin"
    stream_id: StreamId
    version: Version
    base_version: Version | None
    layout_hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    payload_bytes: Count
    places: Count
    timeout_s: Seconds
    attempt: Count


class Attempt(_Message):
    """What follows on this lane belongs to the `begin` of this attempt; earlier things are void."""

    kind: Literal["attempt"] = "attempt"
    number: Count


class Shares(_Message):
    """What a rank of a trainer sends on this lane from now on: see `wire.shares`.

    Without it a lane carries all of the layout. Its payload has a row for each share.
    """

    kind: Literal["shares"] = "shares"
    version: Version
    num_shares: Annotated[int, Field(ge=0, lt=1 << 32)]


class Bucket(_Message):
    """Announces one payload of changes, of tiles whose elements have `item_size` bytes.

    It has so many `tiles`, `places` and elements of `whole` tiles: see `wire.changes`.
    """

    kind: Literal["bucket"] = "bucket"
    version: Version
    sequence: Count
    item_size: Literal[1, 2, 4, 8]
    tiles: Annotated[int, Field(ge=1, lt=1 << 32)]
    places: Annotated[int, Field(ge=0, lt=1 << 40)]
    whole: Annotated[int, Field(ge=0, lt=1 << 40)]
    compression: Compression

    @property
    def sizes(self) -> Sizes:
        """Of the payload, when it is inflated."""
        return Sizes(self.item_size, self.tiles, self.places, self.whole)


class Prepare(_Message):
    """Every bucket was sent: stage, predict the digest, and report it.

    Readers that cannot answer, and only these, are told which `digest` the weights must have.
    """

    kind: Literal["prepare"] = "prepare"
    version: Version
    num_buckets: Count
    digest: Digest | None


class Prepared(_Message):
    """Everything that can fail is done; `digest` is that of the weights after the commit."""

    kind: Literal["prepared"] = "prepared"
    version: Version
    digest: Digest
    staged_bytes: Count


class Commit(_Message):
    """The version is decided: write it."""

    kind: Literal["commit"] = "commit"
    version: Version


class Committed(_Message):
    """Written and read back; `digest` is that of the weights."""

    kind: Literal["committed"] = "committed"
    version: Version
    digest: Digest
    commit_s: Seconds


class Finish(_Message):
    """Engines of several ranks keep the version, except those with a failed rank, which undo it.

    An engine of one rank gets none.
    """

    kind: Literal["finish"] = "finish"
    version: Version
    undo: Engines


class Abort(_Message):
    """The version was not decided and never will be."""

    kind: Literal["abort"] = "abort"
    version: Version
    reason: Text


class Failed(_Message):
    """The receiver could not do what the sender asked for."""

    kind: Literal["failed"] = "failed"
    version: Version | None
    error: Text
    reason: Text


class Refused(_Message):
    """The sender refuses a receiver and reports why."""

    kind: Literal["refused"] = "refused"
    error: Text
    reason: Text


Message = (
    Hello
    | Lane
    | Layout
    | Held
    | Welcome
    | Upcoming
    | Begin
    | Attempt
    | Shares
    | Bucket
    | Prepare
    | Prepared
    | Commit
    | Committed
    | Finish
    | Abort
    | Failed
    | Refused
)


def entries(specs: tuple[ParameterSpec, ...]) -> tuple[Entry, ...]:
    """Return `specs` as a hello or a layout has them. Raises ConfigError if one is too large."""
    check_limits(specs)
    return tuple((spec.names, spec.shape, spec.dtype.code) for spec in specs)


def layout_hash(specs: tuple[ParameterSpec, ...]) -> str:
    """`Layout.hash` of these parameters."""
    return _hash(entries(specs))


def _hash(entries: tuple[Entry, ...]) -> str:
    return hashlib.sha256(TypeAdapter(tuple[Entry, ...]).dump_json(entries)).hexdigest()
