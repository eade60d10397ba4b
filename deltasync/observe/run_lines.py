"""The lines of a run log, read and checked. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from deltasync.errors import ConfigError

FORMAT = 1
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[FiniteFloat, Field(ge=0, le=1e15)]
Mark = Literal["failed", "recovered", "lost", "full sync", "joined", "warning"]


class Line(BaseModel):
    """An event, with the fields of `SyncStats`, `ReceiveStats`, `PublishStats` or `SyncFailed`.

    What an event does not have is empty. "run" begins what a process has written.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: Literal["run", "sync", "receive", "publish", "failed"]
    time: Annotated[FiniteFloat, Field(ge=0, le=1e11)]
    format: Literal[1] = 1
    role: str = ""
    name: str = ""
    version: Count | None = None
    kind: str = ""
    receivers: Count = 0
    joined: Count = 0
    full_synced: Count = 0
    numel: Count = 0
    nnz: Count = 0
    payload_bytes: Count = 0
    joined_bytes: Count = 0
    delta_bytes: Count = 0
    anchor_bytes: Count = 0
    num_bytes: Count = 0
    dense_bytes: Count | None = None
    commit_s: Seconds | None = None
    pause_s: Seconds | None = None
    total_s: Seconds | None = None
    warnings: tuple[str, ...] = ()
    lost: dict[str, str] = {}
    error: str = ""
    message: str = ""
    was_dirty: bool = False
    is_dirty: bool = False
    corrupted: str = ""

    @model_validator(mode="after")
    def _has_what_is_shown(self) -> Self:
        if self.event not in ("run", "failed") and self.version is None:
            raise ValueError("no version")
        return self

    @property
    def sent(self) -> int:
        """Bytes of the version; of full syncs to those that join, too."""
        sent = self.payload_bytes + self.joined_bytes
        return sent + self.delta_bytes + self.anchor_bytes + self.num_bytes

    @property
    def density(self) -> float | None:
        """Share of the elements that changed; None but for deltas whose elements are counted."""
        return self.nnz / self.numel if self.kind == "delta" and self.numel else None

    @property
    def pause(self) -> float | None:
        """Seconds in which engines pause; None where none does, or it is not known."""
        if self.event == "sync":
            return self.commit_s
        return None if self.kind == "joined" else self.pause_s


class Happening(NamedTuple):
    """What is listed below the charts.

    Attributes:
        mark: What it is.
        line: What says so.
        text: What happened.
        who: What it happened to.
    """

    mark: Mark
    line: Line
    text: str
    who: str = ""


@dataclass(frozen=True)
class Run:
    """What a log has.

    Attributes:
        lines: In order.
        skipped: What could not be read: (number of the line, why).
    """

    lines: tuple[Line, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    @cached_property
    def source(self) -> str:
        """Whose syncs are shown: of a sender, else of what was published, else received."""
        kinds = {line.event for line in self.lines}
        return next((kind for kind in ("sync", "publish") if kind in kinds), "receive")

    @cached_property
    def rows(self) -> list[Line]:
        """Of each version of `source`. Versions may begin again, when a trainer does."""
        return [line for line in self.lines if line.event == self.source]

    @cached_property
    def failures(self) -> Counter[str]:
        """Failed syncs by type of error."""
        return Counter(line.error for line in self.lines if line.event == "failed")

    @cached_property
    def happenings(self) -> list[Happening]:
        """What happened, in order."""
        return [one for line in self.lines for one in _happenings_of(line)]

    def count(self, mark: Mark) -> int:
        """How often something happened."""
        return sum(each.mark == mark for each in self.happenings)


def _happenings_of(line: Line) -> Iterator[Happening]:
    if line.event == "failed":
        dirty = "; the receiver is dirty" if line.is_dirty else ""
        where = f"corrupted weights in {line.corrupted}: " if line.corrupted else ""
        text = f"{where}{line.error}: {line.message}{dirty}"
        yield Happening("failed", line, text, line.name or line.role)
    for name, why in line.lost.items():
        yield Happening("lost", line, why, name)
    if line.full_synced:
        text = f"{line.full_synced} of {line.receivers} receivers needed a full sync"
        yield Happening("full sync", line, text)
    if line.joined > line.full_synced:
        text = f"{line.joined - line.full_synced} receivers joined by digest"
        yield Happening("joined", line, text)
    if line.was_dirty:
        yield Happening("recovered", line, "a dirty receiver is whole", line.name)
    elif line.kind == "joined":
        yield Happening("joined", line, "joined by digest", line.name)
    for warning in line.warnings:
        yield Happening("warning", line, warning)


def read_run(path: str | Path) -> Run:
    """Read a log. Lines that are torn or wrong are skipped, and reported.

    Raises:
        ConfigError: It cannot be read, or no line of it is of a log.
    """
    lines, skipped = list[Line](), list[tuple[int, str]]()
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    lines.append(Line.model_validate_json(line))
                except ValidationError as error:
                    is_torn = not line.endswith(b"\n")
                    skipped.append((number, "torn" if is_torn else _why(error)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if not lines:
        raise ConfigError(f"{path}: no line of it is of a log that a RunLog has written")
    return Run(tuple(lines), tuple(skipped))


def _why(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
