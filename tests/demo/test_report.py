"""What a user is shown, and that the numbers in it are honest."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from deltasync import SyncStats
from deltasync.demo.report import Report, Score, Summary, VersionRecord, print_summary
from deltasync.demo.task import SortTask
from deltasync.demo.trainer import EVALUATION_SEED


def record(version: int, nnz: int) -> VersionRecord:
    stats = SyncStats(
        version=version,
        base_version=version - 1 or None,
        kind="delta" if version > 1 else "full",
        receivers=1,
        numel=1000,
        nnz=nnz,
        payload_bytes=6 * nnz if version > 1 else 2000,
        dense_bytes=2000,
        diff_s=0.001,
        transfer_s=0.002,
        commit_s=0.003,
        receiver_commit_s=0.003,
        total_s=0.006,
        sender_bytes=0,
        receiver_bytes=0,
        snapshot_bytes=0,
    )
    return VersionRecord(stats=stats, reward=0.25, verified=True)


RECORDS = [record(1, 1000), record(2, 10), record(3, 30)]
SCORE = Score.of([0.0, 1.0] * 128)
SUMMARY = Summary(
    before=SCORE,
    after=SCORE,
    trainer_sha256="ab" * 32,
    rollout_sha256="ab" * 32,
    warm_up_s=1.0,
    training_s=2.0,
)


@pytest.fixture
def text() -> io.StringIO:
    return io.StringIO()


def test_evaluation_prompts_are_not_those_of_seed_0() -> None:
    # torch keeps 32 bits of a CPU seed: one beyond them would be a small one in disguise.
    mine, others = (
        SortTask().sample_prompts(100, torch.Generator().manual_seed(seed))
        for seed in (EVALUATION_SEED, 0)
    )
    assert not torch.equal(mine, others)


def test_piped_rows_have_no_colour_and_line_up(text: io.StringIO) -> None:
    report = Report(Console(file=text, width=40))
    report.warm_up(1, 1, 2.0)
    for one in RECORDS:
        report.version(one)
    _, heading, *rows = text.getvalue().splitlines()
    assert heading.split()[:4] == ["version", "kind", "reward", "density"]
    assert {len(row) for row in rows} == {len(heading)}
    assert "3.0%" in rows[2]
    assert "9.0%" in rows[2]
    assert "\x1b" not in text.getvalue()


def test_the_summary_counts_deltas_alone(text: io.StringIO) -> None:
    print_summary(Console(file=text, width=100), SUMMARY, RECORDS)
    said = text.getvalue()
    assert "median 2.0%, highest 3.0%" in said
    assert "6.0%" in said  # 240 of 4000 bytes: the full sync is not in it
    assert "0.500 +- 0.031" in said
    assert "3 of 3 versions agree" in said
    assert "equal in both processes" in said
