"""The table of what was found on GPUs, of lines that are made up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import Environment
from tests.engines import support, sweep

_PLACES = "a\n<!-- begin cpu -->\n<!-- end cpu -->\nb\n<!-- begin gpu -->\n<!-- end gpu -->\nc\n"
_FACTS = {"vllm": "0.0", "torch": "0.0", "gpus": {"Toy GPU": 2}}


def line(name: str, outcome: str, **others: Any) -> dict[str, Any]:
    facts = {} if outcome == "failed" else _FACTS
    return {"name": name, "outcome": outcome} | facts | others


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Of all lines but the head."""
    lines = [one for one in support.make_table(rows).splitlines() if one.startswith("| ")]
    return [one[2:-2].split(" | ") for one in lines[2:]]


def test_a_row_says_the_engine_the_kernels_and_what_was_found() -> None:
    kernels = ["UnquantizedLinearMethod", "SomeKernel", "OtherKernel"]
    rows = [line("Toy/TP 2, EP 2", "routed", kernels=kernels)]
    wanted = ["vLLM 0.0", "Toy GPU", "Toy", "TP 2, EP 2", "OtherKernel, SomeKernel", "routed"]
    assert cells(rows) == [wanted]


def test_a_reason_is_one_short_line() -> None:
    [[*_, reloaded], [*_, refused]] = cells(
        [
            line("A/eager", "reloaded", refused="because\nof | this"),
            line("B/eager", "refused", refused="x" * 1000),
        ]
    )
    assert reloaded == r"reloaded: because of \| this"
    assert refused.startswith("refused: xxx")
    assert refused.endswith("...")
    assert len(refused) < 300


def test_what_is_wrong_or_failed_is_shown() -> None:
    rows = [
        line("A/serve", "WRONG", wrong=[], requests=7, syncs=["delta"] * 3, failures=["gone"]),
        line("B/eager", "failed", printed="much\nout of memory\n"),
    ]
    assert [one[-1] for one in cells(rows)] == [
        "failed: out of memory",
        "WRONG: gone; 7 requests during 3 syncs, 1 failed",
    ]


def test_the_latest_row_of_a_case_counts() -> None:
    rows = [
        line("A/eager", "failed", printed="x"),
        line("B/eager", "routed"),
        line("B/eager", "failed", printed="y"),
        line("A/eager", "WRONG", wrong=["weight"]),
        line("A/eager", "routed"),
        line("A/eager", "routed", gpus={"Other GPU": 1}),
    ]
    assert [one[1::4] for one in cells(rows)] == [
        ["", "failed: y"],
        ["Other GPU", "routed"],
        ["Toy GPU", "routed"],
        ["Toy GPU", "routed"],
    ]


def test_each_table_has_its_place(tmp_path: Path) -> None:
    page, records = tmp_path / "support.md", tmp_path / "gpu.jsonl"
    page.write_text(_PLACES, encoding="utf-8")
    environment = asdict(Environment.here()) | {"commit": "0123456789abcdef"}
    rows = [line("A/eager", "routed", environment=environment)] * 2
    records.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    for _ in range(2):
        support.write_cpu(page, {("Toy 0.0", "of CPUs"): {"1": "routed"}})
        support.write_gpu(page, [records])
    text = page.read_text(encoding="utf-8")
    assert text.count("| of CPUs |") == text.count("| A |") == text.count("0123456789ab") == 1
    assert text.index("a\n") < text.index("of CPUs") < text.index("b\n") < text.index("| A |")


def swept(name: str, *found: str, **more: Any) -> dict[str, Any]:
    """What the sweep has recorded of an architecture."""
    verdict = {"outcome": "equal", "message": "", "wrong": {}, "left_out": []}
    both = {
        setup: {"outcome": outcome, "refuse": verdict | more}
        for setup, outcome in zip(sweep.SETUPS, found, strict=False)
    }
    environment = asdict(Environment.here())
    return {"architecture": name, "checkpoint": "transformers", "environment": environment} | both


def test_architectures_are_judged_with_and_without_packing() -> None:
    rows = {
        "A": swept("A", "routed", "reloaded", left_out=["bias"]),
        "B": swept("B") | {"unbuilt": "no | configuration"},
        "C": swept("C", "refused", "refused", message="stale") | {"checkpoint": "vLLM | why"},
    }
    text = sweep.table(rows)
    assert "Without packing: 1 routed, 1 unbuilt, 1 refused." in text
    assert "As installed: 1 reloaded, 1 unbuilt, 1 refused." in text
    assert "| A | transformers | routed | reloaded | leaves out bias |" in text
    assert r"| B | transformers | unbuilt |  | no \| configuration |" in text
    assert "| C | made up | refused | refused | stale |" in text
    short = sweep.summary(rows)
    assert "| refused | refused | C* |" in short
    assert "| routed | reloaded | A |" in short


def test_what_was_found_is_grouped() -> None:
    found = {
        ("Toy 0.0", "A"): {"1": "routed", "TP 2": "routed"},
        ("Toy 0.0", "B"): {"1": "routed"},
        ("Toy 0.0", "C"): {"1": "refused"},
    }
    text = support.make_cpu_table(found)
    assert "| Toy 0.0 | routed | A (TP 2); B |" in text
    assert "| Toy 0.0 | refused | C |" in text
    rows = [
        line("A/eager", "routed"),
        line("A/sleep", "routed"),
        line("A/LoRA", "refused", refused="x"),
    ]
    assert "| vLLM 0.0 | A | refused: LoRA. routed: eager; sleep |" in support.make_summary(rows)


def test_the_page_has_all_places(tmp_path: Path) -> None:
    page = tmp_path / "support.md"
    page.write_bytes(support.PAGE.read_bytes())
    support.write_cpu(page, {})
    support.write_gpu(page, [])
    support.write_swept(page, tmp_path / "none")
