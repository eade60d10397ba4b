"""`deltasync report` on the log of a real run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.command import call, refused, run, run_forked, told
from tests.observe.test_report import Page


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a demo of four versions."""
    out = tmp_path_factory.mktemp("run")
    done = run_forked("demo", "--quick", "--json", "--steps", "3", "--out", out)
    assert done.returncode == 0, done.stderr
    return out / "run.jsonl"


def test_the_log_of_a_demo_is_drawn(log: Path) -> None:
    found = told("report", log)
    page = log.with_suffix(".html")
    assert found == {"out": str(page), "bytes": page.stat().st_size, "lines": 5, "skipped": []}
    parsed = Page(page.read_text(encoding="utf-8"))
    assert "Density by layer" in parsed.texts
    assert parsed.count("img") == 5


def test_torn_lines_are_said_and_the_rest_is_drawn(log: Path, tmp_path: Path) -> None:
    torn, page = tmp_path / "torn.jsonl", tmp_path / "page.html"
    torn.write_bytes(log.read_bytes()[:-20])
    done = call("report", torn, "--out", page)
    assert done.returncode == 0
    assert done.stderr == "line 5 was skipped: torn\n"
    assert done.stdout.startswith(f"{page}: 4 lines, ")
    assert list(tmp_path.glob(".*")) == []


def test_what_cannot_be_drawn_or_written_is_refused(log: Path, tmp_path: Path) -> None:
    assert "No such file" in refused("report", tmp_path / "gone.jsonl")
    assert "no line of it is of a log" in refused("report", __file__, "--out", tmp_path / "x")
    assert "is the log itself" in refused("report", log, "--out", log)
    assert "No such file" in refused("report", log, "--out", tmp_path / "gone" / "x.html")


def test_without_matplotlib_it_says_what_to_install(log: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from deltasync.cli import main; main()"
    done = run(sys.executable, "-c", code, "report", log)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("pip install matplotlib")
    assert len(done.stderr.splitlines()) == 1
