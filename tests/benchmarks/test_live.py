"""The table and the image of running engines, of records that are made up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import live_plots, live_report
from benchmarks.__main__ import GPU_RECORDS
from benchmarks.gpu.report import make_summary
from benchmarks.record import ROOT, SLOW_DOWN, Result, compared, read_records

_GAPS = {
    "gap_s": 0.012,
    "usual_gap_s": 0.006,
    "kept_gap_s": 0.008,
    "several_gap_s": 0.034,
    "several_usual_gap_s": 0.006,
}
_RATES = {
    "before_tokens_per_s": 1500.0,
    "paced_tokens_per_s": 1480.0,
    "kept_paced_tokens_per_s": 1490.0,
    "after_tokens_per_s": 1510.0,
}


def made_up(
    model: str, density: float, parts: dict[str, float], *, case: str = "", link: str = "cpu"
) -> Result:
    return compared(
        case=case or ("live_changed" if density else "live_unchanged"),
        samples=[0.016],
        baseline_samples=[0.020],
        baseline="the update in several calls",
        ratio_is=SLOW_DOWN,
        goal=None,
        numel=1000,
        parameters=10,
        density=density,
        changed=1,
        parts={"total_s": 0.016, "several_total_s": 0.020, **parts},
        model=model,
        link=link,
    )


def test_engines_with_requests_are_drawn_at_the_largest_share(tmp_path: Path) -> None:
    results = [
        made_up("toy, LLM", 0.003, {}),
        *(made_up("toy, AsyncLLM", density, _GAPS | _RATES) for density in (0.001, 0.003, 0.0)),
    ]
    [path] = live_plots.draw_all(results, tmp_path, name="live-cpu")
    assert path.name == "live-cpu-requests.svg"
    assert live_plots.draw_all(results[:1], tmp_path, name="live-cpu") == []


def test_the_table_has_a_row_for_each_record() -> None:
    *_, reload, changed, unchanged, _, _ = live_report.make_markdown(
        [
            made_up("toy, LLM", 0.003, {}, case="live_reload"),
            made_up("toy, AsyncLLM", 0.003, _GAPS | _RATES),
            made_up("toy, AsyncLLM", 0.0, _GAPS | _RATES),
        ]
    ).split("\n")
    assert reload.startswith("| toy, LLM | all, by vLLM's own reload | 0.02 s |")
    assert "| 12 (34) ms | 8 ms | 6 (6) ms | 1500 | 1480 | 1490 | 1510 |" in changed
    assert "| nothing | 16 (20) ms |" in unchanged
    assert "1500" not in unchanged


def test_the_summary_shows_what_requests_of_a_server_see() -> None:
    gpu = read_records(GPU_RECORDS["NCCL"])
    running = [
        made_up("toy, vllm serve, two GPUs", 0.003, _GAPS, link="NCCL"),
        made_up("toy, vllm serve", 0.001, _GAPS, link="CUDA IPC"),
        made_up("toy, LLM", 0.001, {}, link="NCCL"),
    ]
    summary = make_summary(gpu, running)
    assert "of vllm serve (and without a sync) |  | 12.0 ms (6.00 ms) |" in summary
    assert "Requests: " in summary
    assert "vllm serve" not in make_summary(gpu)


def test_engines_are_measured_without_what_draws() -> None:
    """Environments of engines have no matplotlib."""
    code = "import sys; sys.modules['matplotlib'] = None; import benchmarks.__main__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100, check=True)
