"""What a user sees of a run: a row for each version, the summary, and the files of `--out`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Self

from rich.console import Console
from rich.text import Text
from torch import Tensor

from deltasync import SyncStats
from deltasync.files.output import appearing, write_output

_OF_STATS = (
    *("version", "kind", "nnz", "numel", "density", "payload_bytes", "dense_bytes"),
    *("diff_s", "transfer_s", "commit_s"),
)


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version of the weights: how it was synced, and how good it is.

    Attributes:
        stats: Of the sync.
        reward: Mean reward of the rollouts that this version generated.
        verified: The SHA-256 of the bytes that the rollout process holds equals the trainer's.
    """

    stats: SyncStats
    reward: float
    verified: bool

    def as_json(self) -> dict[str, Any]:
        """What is written of it."""
        found = {name: getattr(self.stats, name) for name in _OF_STATS}
        return found | {"reward": self.reward, "verified": self.verified}


@dataclass(frozen=True, slots=True)
class Score:
    """A mean reward on fixed prompts, its standard error, and over how many prompts."""

    mean: float
    standard_error: float
    num_prompts: int

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Self:
        """The score of these rewards."""
        return cls(mean(rewards), stdev(rewards) / len(rewards) ** 0.5, len(rewards))

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.standard_error:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run.

    Attributes:
        before: Of the first version. `after`: of the last.
        trainer_sha256: Of the trainer's last weights as bf16, taken beside the library.
        rollout_sha256: Of the bytes that the rollout process holds at the end.
        warm_up_s: Starting up and supervised training. `training_s`: everything after.
    """

    before: Score
    after: Score
    trainer_sha256: str
    rollout_sha256: str
    warm_up_s: float
    training_s: float

    @property
    def bit_identical(self) -> bool:
        """Whether both processes end with the same bytes."""
        return self.trainer_sha256 == self.rollout_sha256


_COLUMNS: tuple[tuple[str, int, Callable[[VersionRecord], str]], ...] = (  # title, width, text
    ("version", 7, lambda record: str(record.stats.version)),
    ("kind", 5, lambda record: record.stats.kind),
    ("reward", 6, lambda record: f"{record.reward:.3f}"),
    ("density", 7, lambda record: f"{record.stats.density:.1%}"),
    ("sent", 8, lambda record: f"{record.stats.payload_bytes / 1e6:.2f} MB"),
    ("of dense", 8, lambda r: f"{r.stats.payload_bytes / r.stats.dense_bytes:.1%}"),
    ("diff", 8, lambda record: f"{record.stats.diff_s * 1e3:.1f} ms"),
    ("transfer", 8, lambda record: f"{record.stats.transfer_s * 1e3:.1f} ms"),
    ("commit", 8, lambda record: f"{record.stats.commit_s * 1e3:.1f} ms"),
    ("digest", 7, lambda record: "agrees" if record.verified else "DIFFERS"),
)


class Report:
    """Prints a line for each version, and keeps what `write_files` writes.

    Args:
        console: For the table and the summary.

    Attributes:
        records: Of all versions.
        checkpoints: Weights of the "first" and the "last" version as they were sent, in bf16.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.records: list[VersionRecord] = []
        self.checkpoints: dict[str, dict[str, Tensor]] = {}

    def warm_up(self, step: int, of: int, loss: float) -> None:
        """Print a line for the first step, and then for each sixth of them."""
        if step == 1 or step % max(1, of // 6) == 0:
            self._line(Text(f"warm-up step {step} of {of}, loss {loss:.3f}"))

    def version(self, record: VersionRecord) -> None:
        """Print its row, under the headings if it is the first."""
        self.records.append(record)
        if len(self.records) == 1:
            titles = (title.rjust(width) for title, width, _ in _COLUMNS)
            self._line(Text("  ".join(titles), "bold"))
        *row, digest = (text(record).rjust(width) for _, width, text in _COLUMNS)
        line = Text("  ".join([*row, ""]))
        self._line(line.append(digest, "green" if record.verified else "bold red"))

    def _line(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)


def print_summary(console: Console, summary: Summary, records: Sequence[VersionRecord]) -> None:
    """Print the summary under the table."""
    console.print()
    for label, value in summary_lines(summary, records):
        console.print(Text(label.ljust(17), "bold").append(value, "not bold"), soft_wrap=True)


def summary_lines(summary: Summary, records: Sequence[VersionRecord]) -> list[tuple[str, str]]:
    """(label, value) pairs."""
    deltas = [record.stats for record in records if record.stats.kind == "delta"]
    agreed = sum(record.verified for record in records)
    same = "equal in both processes" if summary.bit_identical else "DIFFERENT in the two processes"
    lines = [
        ("reward", f"{summary.before}  ->  {summary.after}"),
        ("", f"mean +- standard error, the same {summary.before.num_prompts} prompts each time"),
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
    return [
        ("density", f"median {median(densities):.1%}, highest {max(densities):.1%}"),
        ("bytes of deltas", f"{sent / 1e6:.1f} MB, dense {dense / 1e6:.1f} MB: {sent / dense:.1%}"),
    ]


def write_files(folder: Path, report: Report, summary: Summary) -> None:
    """Write records.jsonl, summary.json and checkpoints into `folder`, which exists."""
    from safetensors.torch import save_file

    lines = "".join(json.dumps(record.as_json()) + "\n" for record in report.records)
    write_output(folder / "records.jsonl", lines.encode("ascii"))
    text = json.dumps(asdict(summary), indent=2) + "\n"
    write_output(folder / "summary.json", text.encode("ascii"))
    for name, tensors in report.checkpoints.items():
        with appearing(folder / f"{name}.safetensors", replaces=True) as made:
            save_file(tensors, made)
