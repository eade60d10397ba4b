"""The Grafana dashboard asks for metrics that exist, and the page documents each of them."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

prometheus = pytest.importorskip("prometheus_client")
from deltasync.observe.metrics import Metrics  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads(
    files("deltasync.observe").joinpath("grafana.json").read_text(encoding="utf-8")
)
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def samples() -> dict[str, set[str]]:
    """Names of samples that queries may use, and their labels."""
    registry = prometheus.CollectorRegistry()
    metrics = Metrics(registry)
    labels = {
        family._name: set(family._labelnames)
        for family in vars(metrics).values()
        if hasattr(family, "_labelnames")
    }
    found: dict[str, set[str]] = {}
    for metric in registry.collect():
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
        for end in ends[metric.type]:
            extra = {"le"} if end == "_bucket" else set()
            found[metric.name + end] = labels[metric.name] | extra
    return found


SAMPLES = samples()


def unknown(expression: str) -> list[str]:
    """Metrics that an expression asks for and nothing has."""
    names = re.findall(r"\bdeltasync_\w+", expression)
    assert names
    return [name for name in names if name not in SAMPLES]


@pytest.mark.promise(
    "What operators see",
    "The dashboard asks for metrics that exist, and each is documented.",
)
def test_queries_and_alerts_ask_for_metrics_that_exist() -> None:
    for query in QUERIES:
        assert unknown(query) == []
        names = re.findall(r"\bdeltasync_\w+", query)
        known = set().union(*(SAMPLES[name] for name in names)) | {"instance"}
        by = re.findall(r"by \((\w+)\)", query) + re.findall(r"(\w+)=~?\"", query)
        assert set(by) <= known
    [instance] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "instance"]
    [name] = re.findall(r"label_values\((\w+), instance\)", instance["definition"])
    registry = prometheus.CollectorRegistry()
    Metrics(registry)
    found = {sample.name for metric in registry.collect() for sample in metric.samples}
    assert name in found, "each instance has it from the beginning"
    table = PAGE.partition("### Alerts")[2].partition("## ")[0]
    conditions = re.findall(r"^\| `(.*?)` \|", table, flags=re.MULTILINE)
    assert conditions
    assert [one for condition in conditions for one in unknown(condition)] == []


@pytest.mark.promise(
    "What operators see",
    "The dashboard asks for metrics that exist, and each is documented.",
)
def test_every_metric_is_on_the_dashboard_and_on_the_page() -> None:
    asked = " ".join(QUERIES)
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SAMPLES}
    assert [name for name in sorted(bare) if name not in asked] == []
    rows = re.findall(r"^\| `(deltasync_\w+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(bare)
