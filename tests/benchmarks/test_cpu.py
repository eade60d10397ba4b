"""Every benchmark runs, at tiny size; how long anything takes is not asserted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases import GROUPS
from benchmarks.record import MEMORY, SLOW_DOWN, SPEED_UP, RatioIs, Result, compared, read_records
from benchmarks.report import TITLES, make_markdown
from benchmarks.workload import SCALES, Flip, bits_of, decoder

TINY = SCALES["tiny"]

pytestmark = pytest.mark.timeout(300)  # whichever is first waits for all benchmarks


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    with one_thread():
        return [result for group in GROUPS.values() for result in group(TINY)]


def test_every_case_is_measured(results: list[Result]) -> None:
    assert {result.case for result in results} == set(TITLES)


def test_records_say_what_was_done(results: list[Result]) -> None:
    for result in results:
        assert result.seconds > 0
        assert result.ratio > 0
        assert 0 < result.changed <= result.numel
        if result.ratio_is in (SPEED_UP, SLOW_DOWN):
            assert result.baseline
            assert len(result.samples) == len(result.baseline_samples) == TINY.rounds
        if result.ratio_is == MEMORY:
            assert result.bound_bytes > 0


def test_a_sparse_sync_sends_less_than_a_dense_one(results: list[Result]) -> None:
    (sync,) = (r for r in results if r.case == "sync_over_dense" and r.density == 0.01)
    assert 0 < sync.bytes < sync.bound_bytes / 10


def test_records_survive_json(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(result.to_json() + "\n" for result in results))
    assert read_records(path) == results


def test_a_later_record_replaces_an_earlier_one(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(2 * (results[0].to_json() + "\n"))
    assert read_records(path) == [results[0]]


@pytest.mark.parametrize(
    ("ratio_is", "seconds", "goal", "ratio", "met"),
    [
        (SPEED_UP, 1.0, 1.7, 2.0, True),
        (SPEED_UP, 2.0, 1.7, 1.0, False),
        (SLOW_DOWN, 2.0, 1.1, 1.0, True),
        (SLOW_DOWN, 3.0, 1.1, 1.5, False),
        (SLOW_DOWN, 3.0, None, 1.5, True),
    ],
)
def test_goals(
    ratio_is: RatioIs, seconds: float, goal: float | None, ratio: float, met: bool
) -> None:
    result = compared(
        case="diff",
        numel=1 << 26,
        parameters=1,
        density=0.5,
        changed=1,
        samples=[seconds],
        baseline_samples=[2.0],
        ratio_is=ratio_is,
        goal=goal,
    )
    assert (result.ratio, result.met) == (ratio, met)


def test_goals_are_for_large_models() -> None:
    result = compared(
        case="diff",
        numel=1 << 20,
        parameters=1,
        density=0.5,
        changed=1,
        samples=[1.0],
        baseline_samples=[1.0],
        ratio_is=SPEED_UP,
        goal=1.7,
    )
    assert result.goal is None


def test_flip_undoes_itself_and_changes_its_share() -> None:
    module = decoder(64, 1)
    before = torch.cat([bits.clone() for bits in bits_of(module)])
    flip = Flip(module, 0.1)
    flip.apply()
    changed = int((torch.cat(bits_of(module)) != before).sum())
    assert changed == flip.count
    assert 0.08 < changed / len(before) < 0.12
    flip.apply()
    assert torch.equal(torch.cat(bits_of(module)), before)


def test_markdown_shows_every_ratio_but_the_crossover(results: list[Result]) -> None:
    text = make_markdown(results)
    assert all(TITLES[r.case] in text for r in results if r.case != "crossover")
    by_density = ("diff", "diff_with_digests", "apply", "sync_over_diff", "sync_over_dense")
    ratios = [f" {r.ratio:.2f}x |" for r in results if r.case in by_density]
    assert all(ratio in text for ratio in ratios)


def test_json_is_all_that_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SCALES, "quick", TINY)
    main = sys.modules["benchmarks.__main__"]
    monkeypatch.setattr(main, "run_group", lambda group, scale: GROUPS[group](SCALES[scale]))
    out = tmp_path / "out.jsonl"
    options = ["cpu", "--quick", "--json", "--only", "apply", "--out", str(out)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert [Result.from_json(line) for line in done.stdout.splitlines()] == read_records(out)


def test_plots_are_drawn(results: list[Result], tmp_path: Path) -> None:
    from benchmarks.plots import draw_all

    paths = draw_all(results, tmp_path)
    assert paths
    assert all(path.stat().st_size > 1000 for path in paths)


def test_a_group_runs_in_its_own_process() -> None:
    from benchmarks.runner import run_group

    assert [r.case for r in run_group("apply", "tiny")] == ["apply", "apply"]
