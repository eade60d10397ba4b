"""The files of `--out`: one JSON line per version, the summary, a plot, and two checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors.torch import save_file

from deltasync.demo.records import Checkpoint, Summary, VersionRecord
from deltasync.files.output import appearing, write_output

BLUE, ORANGE, GREY = "#2f6db3", "#d9822b", "#8a8f98"
MOST_AVERAGED = 20  # versions


def write_files(
    folder: Path,
    records: Sequence[VersionRecord],
    summary: Summary,
    checkpoints: Sequence[Checkpoint],
) -> None:
    """Write records.jsonl, summary.json, demo.png and checkpoints into `folder`, which exists."""
    lines = "".join(json.dumps(record.as_json()) + "\n" for record in records)
    write_output(folder / "records.jsonl", lines.encode("ascii"))
    text = json.dumps(asdict(summary), indent=2) + "\n"
    write_output(folder / "summary.json", text.encode("ascii"))
    with appearing(folder / "demo.png", replaces=True) as made:
        plot(records, summary).savefig(made, dpi=150)
    for checkpoint in checkpoints:
        with appearing(folder / f"{checkpoint.name}.safetensors", replaces=True) as made:
            save_file(checkpoint.tensors, made)


def plot(records: Sequence[VersionRecord], summary: Summary) -> Figure:
    """Reward, density and bytes over the versions."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    reward, density, sent = figure.subplots(3, 1, sharex=True)
    _plot_reward(reward, records, summary)
    _plot_density(density, records)
    _plot_bytes(sent, records)
    sent.set_xlabel("version")
    for axes in (reward, density, sent):
        axes.grid(axis="y", color="#e4e6ea")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure


def _plot_reward(axes: Axes, records: Sequence[VersionRecord], summary: Summary) -> None:
    versions = [record.stats.version for record in records]
    rewards = [record.reward for record in records]
    axes.plot(versions, rewards, ".", color=BLUE, alpha=0.35, label="rollouts of one version")
    window = min(MOST_AVERAGED, 1 + len(rewards) // 4)
    means = [sum(rewards[i - window : i]) / window for i in range(window, len(rewards) + 1)]
    axes.plot(versions[window - 1 :], means, color=BLUE, label=f"mean of {window} versions")
    ends = (summary.before.sampled, summary.after.sampled)
    axes.errorbar(
        (versions[0], versions[-1]),
        [score.mean for score in ends],
        [score.standard_error for score in ends],
        fmt="o",
        color=ORANGE,
        capsize=4,
        label=f"{ends[0].num_prompts} fixed prompts, +- standard error",
    )
    axes.set_ylim(0, 1)
    axes.set_title("reward: share of answers that are right in every digit", loc="left")
    axes.legend(frameon=False, loc="lower right")


def _plot_density(axes: Axes, records: Sequence[VersionRecord]) -> None:
    deltas = [record.stats for record in records if record.stats.kind == "delta"]
    axes.plot([r.version for r in deltas], [100 * r.density for r in deltas], color=BLUE)
    axes.set_ylim(bottom=0)
    axes.set_title("density of the deltas: changed elements, %", loc="left")


def _plot_bytes(axes: Axes, records: Sequence[VersionRecord]) -> None:
    syncs = [record.stats for record in records]
    versions = [sync.version for sync in syncs]
    dense = [sync.dense_bytes / 1e6 for sync in syncs]
    axes.plot(versions, dense, "--", color=GREY, label="dense sync")
    for kind, style in (("full", "o"), ("delta", "-")):
        some = [sync for sync in syncs if sync.kind == kind]
        sizes = [sync.payload_bytes / 1e6 for sync in some]
        color = ORANGE if kind == "full" else BLUE
        axes.plot([r.version for r in some], sizes, style, color=color, label=f"{kind} sync")
    axes.set_ylim(0, 1.1 * max(dense))
    axes.set_title("bytes sent for one version, MB", loc="left")
    axes.legend(frameon=False, loc="lower right", ncols=3)
