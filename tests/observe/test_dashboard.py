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
        for value in vars(metrics).values()
        for family in [getattr(value, "family", value)]
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


@pytest.mark.promise(
    "What operators see",
    "The dashboard asks for metrics that exist, and each is documented.",
)
@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_metrics_that_exist(query: str) -> None:
    names = re.findall(r"\bdeltasync_\w+", query)
    assert names
    assert [name for name in names if name not in SAMPLES] == []
    known = set().union(*(SAMPLES[name] for name in names)) | {"instance"}
    by = re.findall(r"by \((\w+)\)", query) + re.findall(r"(\w+)=~?\"", query)
    assert set(by) <= known
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}") == len(names)


def test_instances_are_found_by_a_metric_that_each_has_from_the_beginning() -> None:
    [instance] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "instance"]
    assert instance["query"]["query"] == instance["definition"]
    [name] = re.findall(r"label_values\((\w+), instance\)", instance["definition"])
    registry = prometheus.CollectorRegistry()
    Metrics(registry)
    assert name in {sample.name for metric in registry.collect() for sample in metric.samples}


@pytest.mark.promise(
    "What operators see",
    "The dashboard asks for metrics that exist, and each is documented.",
)
def test_every_metric_is_on_the_dashboard_and_on_the_page() -> None:
    asked = " ".join(QUERIES)
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SAMPLES}
    assert [name for name in sorted(bare) if name not in asked] == []
    assert [name for name in sorted(bare) if f"`{name}" not in PAGE] == []


def test_the_page_documents_no_metric_that_does_not_exist() -> None:
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SAMPLES}
    rows = re.findall(r"^\| `(deltasync_\w+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(bare)


def test_alerts_ask_for_metrics_that_exist_and_compare_versions_within_a_job() -> None:
    table = PAGE.partition("### Alerts")[2].partition("## ")[0]
    conditions = re.findall(r"^\| `(.*?)` \|", table, flags=re.MULTILINE)
    assert conditions
    for condition in conditions:
        names = re.findall(r"\bdeltasync_\w+", condition)
        assert names
        assert [name for name in names if name not in SAMPLES] == []
    [behind] = [one for one in conditions if "engine_version" in one]
    assert "max by (job) (deltasync_version) - on (job) " in behind
