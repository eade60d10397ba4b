"""The lines of a run log, read and checked. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from deltasync.errors import ConfigError

FORMAT = 1
ROLES = {"sync": "sender", "receive": "receiver", "publish": "publisher"}
"""Whose success an event is: the role in a failure of the same end."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[FiniteFloat, Field(ge=0, le=1e15)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    time: FiniteFloat


class RunLine(_Line):
    """A process has begun to write."""

    event: Literal["run"]
    format: Literal[1]
    deltasync: str


class SyncLine(_Line):
    """A sync of a sender. Fields as of `SyncStats`."""

    event: Literal["sync"]
    version: Count
    kind: Literal["delta", "full"]
    receivers: Count
    joined: Count
    full_synced: Count
    lost: dict[str, str]
    numel: Count
    nnz: Count
    payload_bytes: Count
    joined_bytes: Count
    dense_bytes: Count
    diff_s: Seconds
    transfer_s: Seconds
    commit_s: Seconds
    total_s: Seconds
    density_by: dict[str, Seconds]
    warnings: tuple[str, ...]


class ReceiveLine(_Line):
    """A sync of a receiver. Fields as of `ReceiveStats`."""

    event: Literal["receive"]
    name: str
    version: Count
    kind: Literal["delta", "full", "joined"]
    num_bytes: Count
    was_dirty: bool
    commit_s: Seconds
    pause_s: Seconds


class PublishLine(_Line):
    """A version that was published. Fields as of `PublishStats`."""

    event: Literal["publish"]
    version: Count
    kind: Literal["delta", "anchor", "unchanged"]
    numel: Count
    nnz: Count
    delta_bytes: Count
    anchor_bytes: Count
    dense_bytes: Count
    total_s: Seconds
    density_by: dict[str, Seconds]
    warnings: tuple[str, ...]


class FailedLine(_Line):
    """A sync that failed. Fields as of `SyncFailed`; how often in a row, counting from 1."""

    event: Literal["failed"]
    role: str
    name: str
    version: Count | None
    error: str
    message: str
    repeated: Count
    lost: dict[str, str]
    is_dirty: bool
    corrupted: str


Line = Union[RunLine, SyncLine, ReceiveLine, PublishLine, FailedLine]  # noqa: UP007 - a TypeAdapter takes it
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


@dataclass(frozen=True, slots=True)
class Run:
    """What a log has.

    Attributes:
        lines: In order.
        skipped: What could not be read: (number of the line, why).
    """

    lines: tuple[Line, ...]
    skipped: tuple[tuple[int, str], ...]


def read_run(path: str | Path) -> Run:
    """Read a log. Lines that are torn or wrong are skipped, and reported.

    Raises:
        ConfigError: It cannot be read, or no line of it is of a log.
    """
    lines, skipped = list[Line](), list[tuple[int, str]]()
    try:
        with Path(path).open("rb") as file:
            for number, line in _numbered(file):
                try:
                    lines.append(_LINE.validate_json(line))
                except ValidationError as error:
                    is_torn = not line.endswith(b"\n")
                    skipped.append((number, "torn" if is_torn else _why(error)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if not lines:
        raise ConfigError(f"{path}: no line of it is of a log that a RunLog has written")
    return Run(tuple(lines), tuple(skipped))


def _numbered(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, from 1."""
    return ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _why(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
