"""What is noted of a sync: it runs on a CPU at toy size, and nothing on a host overlaps."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.gpu import timeline
from benchmarks.gpu.recording import LANES, Span
from benchmarks.gpu.timeline_plots import draw
from benchmarks.record import Environment


@pytest.mark.parametrize("link", ["local", "collective"])
def test_the_lanes_of_both_hosts_lie_within_the_sync(link: str, tmp_path: Path) -> None:
    path = tmp_path / "timelines.jsonl"
    where = ["--device", "cpu", "--geometry", "tiny", "--link", link]
    done = CliRunner().invoke(app, ["gpu", "--timeline", "--out", str(path), *where])
    assert done.exit_code == 0, done.output
    found = timeline.read(path)
    assert [one.density for one in found] == list(timeline.DENSITIES)
    for one in found:
        whole = round(one.seconds * 1e9)
        lanes = {
            lane: list(spans)
            for lane, spans in groupby(sorted(one.spans, key=lambda s: s.lane), lambda s: s.lane)
        }
        assert lanes.keys() == {"trainer", "engine"}
        for spans in lanes.values():
            assert all(0 <= span.begin_ns < span.end_ns <= whole for span in spans)
            assert all(before.end_ns <= after.begin_ns for before, after in pairwise(spans))
        assert {"compare", "pack", "send"} <= {span.what for span in lanes["trainer"]}
        assert {"stage", "write"} <= {span.what for span in lanes["engine"]}
        # Of the trainer all of the time is known.
        assert sum(span.end_ns - span.begin_ns for span in lanes["trainer"]) > 0.99 * whole
        assert timeline.Timeline.from_json(one.to_json()) == one
    assert "| trainer | compare |" in done.output


def test_kernels_have_lanes_of_their_own(tmp_path: Path) -> None:
    spans = tuple(Span(lane, f"kernel {n}", n, 1000 - n) for n, lane in enumerate(LANES))
    environment = Environment.here()
    one = timeline.Timeline("NCCL", "tiny", 0.01, 1e-6, spans, environment)
    (path,) = draw([one, replace(one, density=0.1)], tmp_path, name="timeline-nccl")
    text = path.read_text(encoding="utf-8")
    assert path.name == "timeline-nccl-lanes.svg"
    assert all(lane in text for lane in LANES)
    assert "| engine's GPU | kernel 3 | 0.00 ms |" in timeline.make_markdown([one])
    assert draw([], tmp_path, name="none") == []
