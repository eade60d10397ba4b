"""A run log as what a report shows: a row for each version, and what happened to it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from deltasync.observe.run_lines import (
    ROLES,
    FailedLine,
    Line,
    PublishLine,
    ReceiveLine,
    Run,
    RunLine,
    SyncLine,
)

Mark = Literal["failed", "lost", "full", "joined", "recovered", "warning"]


@dataclass(frozen=True, slots=True)
class Row:
    """One version.

    Attributes:
        version: Its number.
        time: When it was done, in seconds since the Unix epoch.
        sent: Bytes; of full syncs to those that join, too.
        dense: Bytes that all weights take; None if that is not known.
        density: Share of the elements that changed; None but for deltas.
        pause_s, total_s: Seconds; None if they are not known.
        density_by: By layer or parameter.
    """

    version: int
    time: float
    sent: int
    dense: int | None
    density: float | None
    pause_s: float | None
    total_s: float | None
    density_by: dict[str, float]


@dataclass(frozen=True, slots=True)
class Happening:
    """What is listed below the charts.

    Attributes:
        mark: What it is.
        place: The row that it happened before or in.
        time: As of `Row`.
        version: The version, if it is known.
        who: What it happened to.
        text: What happened.
    """

    mark: Mark
    place: int
    time: float
    version: int | None
    who: str
    text: str


@dataclass(slots=True)
class Series:
    """A run.

    Attributes:
        source: Which end the rows are of.
        rows: In order. Versions may begin again, when a trainer does.
        happenings: In order.
        num_failures: Failed syncs, also those that were not written each.
        by_error: The same, by type of error.
        releases: Of deltasync, that wrote the log.
    """

    source: Literal["sync", "publish", "receive"]
    rows: list[Row] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    num_failures: int = 0
    by_error: Counter[str] = field(default_factory=Counter)
    releases: tuple[str, ...] = ()

    def count(self, mark: Mark) -> int:
        """How often something happened."""
        return sum(each.mark == mark for each in self.happenings)


def series_of(run: Run) -> Series:
    """What to show: of the syncs of a sender, else of what was published, else received."""
    kinds = {line.event for line in run.lines}
    source: Literal["sync", "publish", "receive"] = "receive"
    if "sync" in kinds:
        source = "sync"
    elif "publish" in kinds:
        source = "publish"
    found = Series(source)
    releases = dict.fromkeys(line.deltasync for line in run.lines if isinstance(line, RunLine))
    found.releases = tuple(releases)
    _fill(found, run.lines)
    return found


@dataclass(slots=True)
class _End:
    """What is known of the failures of one sender, publisher or receiver.

    Attributes:
        failed: Since it last succeeded.
        repeated: In the streak that is listed last.
        shown: How that is listed.
    """

    failed: int = 0
    repeated: int = 0
    shown: Happening | None = None


def _fill(found: Series, lines: Sequence[Line]) -> None:
    ends = defaultdict[tuple[str, str], _End](_End)
    for line in lines:
        if isinstance(line, RunLine):
            continue
        if isinstance(line, FailedLine):
            _add_failure(found, line, ends[line.role, line.name])
            continue
        place = len(found.rows)
        found.happenings += _of_line(line, place)
        who = line.name if isinstance(line, ReceiveLine) else ""
        if failed := ends.pop((ROLES[line.event], who), _End()).failed:
            text = f"covers {failed} failed sync{'s' if failed > 1 else ''}"
            found.happenings.append(_happening("recovered", place, line, text, who))
        if line.event == found.source:
            found.rows.append(_row(line))
    found.happenings.sort(key=attrgetter("place"))


def _add_failure(found: Series, line: FailedLine, end: _End) -> None:
    is_again = line.repeated > end.repeated > 0
    more = line.repeated - (end.repeated if is_again else 0)
    end.failed, end.repeated = end.failed + more, line.repeated
    found.num_failures += more
    found.by_error[line.error] += more
    if is_again:  # one streak is listed once
        _remove(found.happenings, end.shown)
    place = bisect_right(found.rows, line.time, key=attrgetter("time"))  # it may be told later
    end.shown, *lost = _of_failure(line, place, is_again=is_again)
    found.happenings += end.shown, *lost


def _remove(happenings: list[Happening], one: Happening | None) -> None:
    for number in range(len(happenings) - 1, -1, -1):  # it is near the end
        if happenings[number] is one:
            del happenings[number]
            return


def _row(line: SyncLine | PublishLine | ReceiveLine) -> Row:
    match line:
        case SyncLine():
            is_delta = line.kind == "delta"
            return Row(
                line.version,
                line.time,
                line.payload_bytes + line.joined_bytes,
                line.dense_bytes,
                line.nnz / line.numel if is_delta and line.numel else None,
                line.commit_s,
                line.total_s,
                line.density_by,
            )
        case PublishLine():
            is_delta = line.kind == "delta"
            return Row(
                line.version,
                line.time,
                line.delta_bytes + line.anchor_bytes,
                line.dense_bytes,
                line.nnz / line.numel if is_delta and line.numel else None,
                None,
                line.total_s,
                line.density_by,
            )
        case ReceiveLine():
            pause_s = None if line.kind == "joined" else line.pause_s
            return Row(line.version, line.time, line.num_bytes, None, None, pause_s, None, {})


def _of_line(line: SyncLine | PublishLine | ReceiveLine, place: int) -> Iterator[Happening]:
    match line:
        case SyncLine():
            for who, why in line.lost.items():
                yield _happening("lost", place, line, why, who)
            if line.full_synced:
                text = f"{line.full_synced} of {line.receivers} receivers needed a full sync"
                yield _happening("full", place, line, text)
            if line.joined > line.full_synced:
                text = f"{line.joined - line.full_synced} receivers joined by digest"
                yield _happening("joined", place, line, text)
        case ReceiveLine():
            if line.was_dirty:
                yield _happening("recovered", place, line, "a dirty receiver is whole", line.name)
            elif line.kind == "joined":
                yield _happening("joined", place, line, "joined by digest", line.name)
    if not isinstance(line, ReceiveLine):
        yield from (_happening("warning", place, line, text) for text in line.warnings)


def _of_failure(line: FailedLine, place: int, *, is_again: bool) -> Iterator[Happening]:
    times = f" ({line.repeated} times in a row)" if line.repeated > 1 else ""
    dirty = "; the receiver is dirty" if line.is_dirty else ""
    text = f"{line.error}: {line.message}{dirty}{times}"
    if line.corrupted:
        text = f"corrupted weights in {line.corrupted}: {text}"
    yield _happening("failed", place, line, text, line.name or line.role)
    if not is_again:
        for who, why in line.lost.items():
            yield _happening("lost", place, line, why, who)


def _happening(
    mark: Mark,
    place: int,
    line: SyncLine | PublishLine | ReceiveLine | FailedLine,
    text: str,
    who: str = "",
) -> Happening:
    return Happening(mark, place, line.time, line.version, who, text)
