"""What a user sees of a run: the table as it grows, and the summary."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from deltasync import SyncStats
from deltasync.demo.records import Score, Summary, VersionRecord, WarmUpStep

HEADINGS = {  # and the width of each column
    "version": 7,
    "kind": 5,
    "reward": 6,
    "density": 7,
    "sent": 8,
    "of dense": 8,
    "diff": 8,
    "transfer": 8,
    "commit": 8,
    "digest": 7,
}
LINES_AROUND_TABLE = 8  # of a terminal: headings, rules, progress bars


def cells(record: VersionRecord) -> tuple[str, ...]:
    """One row of the table."""
    stats = record.stats
    return (
        str(stats.version),
        stats.kind,
        f"{record.reward:.3f}",
        f"{stats.density:.1%}",
        f"{stats.payload_bytes / 1e6:.2f} MB",
        f"{stats.payload_bytes / stats.dense_bytes:.1%}",
        f"{stats.diff_s * 1e3:.1f} ms",
        f"{stats.transfer_s * 1e3:.1f} ms",
        f"{stats.commit_s * 1e3:.1f} ms",
        "agrees" if record.verified else "DIFFERS",
    )


class PlainReport:
    """A line for each version, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._headed = False

    def __enter__(self) -> PlainReport:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def warm_up(self, step: WarmUpStep) -> None:
        """Print a line for the first step, and then for each sixth of them."""
        if step.step == 1 or step.step % max(1, step.of // 6) == 0:
            self._line(f"warm-up step {step.step} of {step.of}, loss {step.loss:.3f}")

    def version(self, record: VersionRecord) -> None:
        """Print its row, under the headings if it is the first."""
        if not self._headed:
            self._row(tuple(HEADINGS))
            self._headed = True
        self._row(cells(record))

    def _row(self, row: Sequence[str]) -> None:
        widths = HEADINGS.values()
        self._line("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))

    def _line(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


class JsonReport(PlainReport):
    """One JSON object for each version on stdout; the console, on stderr, gets the rest."""

    def version(self, record: VersionRecord) -> None:
        """Print it."""
        print(json.dumps(record.as_json()), flush=True)


class LiveReport:
    """A table that grows in place above two progress bars, for terminals."""

    def __init__(self, console: Console, num_versions: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._warm_up = self._progress.add_task("warm-up ", total=None)
        self._versions = self._progress.add_task("versions", total=num_versions, start=False)
        self._records: list[VersionRecord] = []
        self._live = Live(self._render(), console=console)

    def __enter__(self) -> LiveReport:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def warm_up(self, step: WarmUpStep) -> None:
        """Move the first bar."""
        self._progress.update(self._warm_up, completed=step.step, total=step.of)
        if step.step == step.of:
            self._progress.start_task(self._versions)
        self._live.update(self._render())

    def version(self, record: VersionRecord) -> None:
        """Add its row and move the second bar."""
        self._records.append(record)
        self._progress.advance(self._versions)
        self._live.update(self._render())

    def _render(self) -> Group:
        if not self._records:
            return Group(self._progress)
        room = max(1, self._console.height - LINES_AROUND_TABLE)
        return Group(_table(self._records[-room:]), self._progress)


def make_report(
    console: Console, num_versions: int, *, as_json: bool
) -> JsonReport | PlainReport | LiveReport:
    """Return the report that fits the output."""
    if as_json:
        return JsonReport(console)
    if console.is_terminal:
        return LiveReport(console, num_versions)
    return PlainReport(console)


def _table(records: Sequence[VersionRecord]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for heading, width in HEADINGS.items():
        table.add_column(heading, justify="right", min_width=width, no_wrap=True)
    for record in records:
        *row, digest = cells(record)
        table.add_row(*row, Text(digest, style="green" if record.verified else "bold red"))
    return table


def print_summary(console: Console, summary: Summary, records: Sequence[VersionRecord]) -> None:
    """Print the summary under the table."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in summary_lines(summary, records):
        grid.add_row(label, Text(value))
    console.print()
    console.print(grid)


def summary_lines(summary: Summary, records: Sequence[VersionRecord]) -> list[tuple[str, str]]:
    """(label, value) pairs."""
    before, after = summary.before, summary.after
    deltas = [record.stats for record in records if record.stats.kind == "delta"]
    agreed = sum(record.verified for record in records)
    same = "equal in both processes" if summary.bit_identical else "DIFFERENT in the two processes"
    lines = [
        ("reward, sampled", f"{_score(before.sampled)}  ->  {_score(after.sampled)}"),
        ("reward, greedy", f"{_score(before.greedy)}  ->  {_score(after.greedy)}"),
        ("", f"mean +- standard error, the same {before.greedy.num_prompts} prompts each time"),
        ("", _movement(before.sampled, after.sampled)),
    ]
    if deltas:
        lines += _delta_lines(deltas)
    return [
        *lines,
        ("digests", f"{agreed} of {len(records)} versions agree"),
        ("sha256", f"{same}: {summary.trainer_sha256[:16]}..."),
        ("time", f"{summary.warm_up_s:.0f} s warm-up, {summary.training_s:.0f} s GRPO"),
    ]


def _delta_lines(deltas: Sequence[SyncStats]) -> list[tuple[str, str]]:
    densities = [stats.density for stats in deltas]
    sent = sum(stats.payload_bytes for stats in deltas)
    dense = sum(stats.dense_bytes for stats in deltas)
    diff, transfer, commit = (
        f"{median(seconds) * 1e3:.1f} ms"
        for seconds in zip(*((r.diff_s, r.transfer_s, r.commit_s) for r in deltas), strict=True)
    )
    return [
        ("density", f"median {median(densities):.1%}, highest {max(densities):.1%}"),
        ("bytes of deltas", f"{sent / 1e6:.1f} MB, dense {dense / 1e6:.1f} MB: {sent / dense:.1%}"),
        ("time of a delta", f"diff {diff}, transfer {transfer}, commit {commit} (medians)"),
    ]


def _movement(before: Score, after: Score) -> str:
    """Whether the reward moved. The two errors are taken as independent, which overstates them."""
    moved = after.mean - before.mean
    error = math.hypot(before.standard_error, after.standard_error)
    found = f"sampled reward {moved:+.3f} +- {error:.3f}"
    if abs(moved) > 2 * error:
        return f"{found}: the policy {'improved' if moved > 0 else 'got worse'}"
    return f"{found}: within noise; --lr 1e-4 --steps 300 trains long enough to see it learn"


def _score(score: Score) -> str:
    return f"{score.mean:.3f} +- {score.standard_error:.3f}"
