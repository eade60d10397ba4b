"""The picture of the dashboard: `python docs/images/dashboard/make.py`. Grafana is not used.

It needs the program `prometheus`. For three minutes a trainer syncs four engines and publishes to a
store; an engine is lost and comes back, another one's weights are damaged, more weights change for
a while. Prometheus scrapes the metrics and answers the dashboard's own queries, and each panel is
drawn where the dashboard has it.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlencode

import matplotlib as mpl
import torch
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, LogLocator, PercentFormatter
from prometheus_client import start_http_server
from torch import nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, subscribe
from deltasync.errors import DeltaSyncError
from deltasync.integrations.http import Http
from deltasync.observe.metrics import Metrics
from deltasync.store.sender import StoreSender
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.staging_thread import StagingThread
from deltasync.transports import shared_memory
from tests.worlds.ranks import free_port

HERE = Path(__file__).parent
LASTS_S, EACH_S, STEPS = 180, 0.5, 360
RATE_INTERVAL = "10s"
COLUMNS, COLUMN, LINE = 24, 0.62, 0.32  # the dashboard's grid: its width, and inches
COLOURS = ["#0b6e4f", "#e0a458", "#3d7ea6", "#b33951", "#8a6fb0", "#8a8a8a"]
STYLE: dict[Any, Any] = {  # matplotlib types every key as a literal
    "font.size": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.prop_cycle": cycler(color=COLOURS),
}
UNITS: dict[str, Formatter] = {
    "none": EngFormatter(sep="", places=None),
    "s": EngFormatter("s", places=0),
    "bytes": EngFormatter("B", places=0),
    "Bps": EngFormatter("B/s", places=0),
    "percentunit": PercentFormatter(1.0, decimals=1),
}

Curves: TypeAlias = dict[str, dict[int, float]]
"""The value at each second, by legend."""


def main() -> None:
    dashboard = json.loads(files("deltasync.observe").joinpath("grafana.json").read_text("utf-8"))
    server, thread = start_http_server(0, addr="127.0.0.1")
    subscribe(Metrics())
    with prometheus(server.server_port) as asked:
        began = time.time()
        sync_for_a_while()
        ended = time.time()
        found = [(panel, answers(asked, panel, began, ended)) for panel in dashboard["panels"]]
    server.shutdown()
    thread.join()
    with mpl.rc_context(STYLE):
        drawn(found).savefig(HERE / "dashboard.png", dpi=110, facecolor="white")


@contextmanager
def prometheus(scraped: int) -> Iterator[Http]:
    """Prometheus that scrapes a port each second."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            {"job_name": "deltasync", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}
        ]
        config = Path(folder, "prometheus.yml")
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        where = [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
        command = ["prometheus", f"--config.file={config}", "--log.level=error", *where]
        with subprocess.Popen(command) as process:
            try:
                yield Http(f"http://127.0.0.1:{port}")
            finally:
                process.terminate()


class Engine:
    """A model that follows the trainer in a thread of its own."""

    def __init__(self, link: shared_memory.Sender, number: int) -> None:
        self.model = policy()
        self._receiver = WeightReceiver(
            ModuleTarget(self.model),
            shared_memory.Receiver(link.path),
            engine=f"engine-{number}",
            options=ReceiverOptions(scrub_every=8),
        )
        self._thread = StagingThread(self._receiver, pause=nullcontext)
        self._thread.__enter__()

    def close(self) -> None:
        self._receiver.close()
        self._thread.__exit__(None, None, None)


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(8)))


def sync_for_a_while() -> None:
    """Two syncs a second, and what happens meanwhile."""
    trained = policy()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        link = shared_memory.Sender()
        sender = stack.enter_context(WeightSender(ModuleSource(trained), link))
        store = StoreSender(ModuleSource(trained), folder)
        engines = {number: Engine(link, number) for number in range(4)}
        sender.wait_for_receivers(len(engines))
        for step in range(STEPS):
            due = time.monotonic() + EACH_S
            train(trained, 0.03 if 0.7 < step / STEPS < 0.8 else 0.003)
            happen(step / STEPS, engines, link)
            try:
                sender.send_weights(timeout_s=5)
            except DeltaSyncError as error:
                print(error)  # noqa: T201
            if step % 10 == 0:
                store.publish()
            time.sleep(max(0.0, due - time.monotonic()))
        for engine in engines.values():
            engine.close()


def train(model: nn.Module, share: float) -> None:
    """Change a share of the weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight[torch.rand_like(weight, dtype=torch.float32) < share] *= 1.01


def happen(now: float, engines: dict[int, Engine], link: shared_memory.Sender) -> None:
    """What befalls engines at a moment, as a share of the whole time."""
    away = {2} if 0.25 <= now < 0.4 else set(range(4)) if 0.87 <= now < 0.89 else set()
    for number in range(4):
        if number in away and number in engines:
            engines.pop(number).close()
        if number not in away | set(engines):
            engines[number] = Engine(link, number)
    if now == 0.55:
        engines[1].model.get_parameter("0.weight").data[0] = 0


def answers(asked: Http, panel: dict[str, Any], began: float, ended: float) -> Curves:
    """What Prometheus answers to the queries of a panel."""
    curves: Curves = {}
    for target in panel.get("targets", []):
        query = target["expr"].replace("$instance", ".*")
        query = query.replace("$__rate_interval", RATE_INTERVAL)
        span = {"query": query, "start": began, "end": ended, "step": 1}
        for series in asked.get(f"api/v1/query_range?{urlencode(span)}")["data"]["result"]:
            name = re.sub(r"{{(\w+)}}", lambda m: series["metric"][m[1]], target["legendFormat"])  # noqa: B023
            curves[name] = {round(at - began): float(value) for at, value in series["values"]}
    return curves


def drawn(found: list[tuple[dict[str, Any], Curves]]) -> Figure:
    """All panels, each at its place."""
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in found)
    figure = Figure(figsize=(COLUMNS * COLUMN, lines * LINE))
    for panel, curves in found:
        at = panel["gridPos"]
        top = 1 - at["y"] / lines
        if panel["type"] == "row":
            figure.text(0.008, top - 0.8 / lines, panel["title"], weight="bold", size=11)
            continue
        left, bottom = (at["x"] + 1.2) / COLUMNS, top - (at["h"] - 2.4) / lines
        axes = figure.add_axes((left, bottom, (at["w"] - 1.6) / COLUMNS, (at["h"] - 3.4) / lines))
        axes.set_title(panel["title"])
        {"stat": stat, "timeseries": time_series}[panel["type"]](axes, panel, curves)
    return figure


def stat(axes: Axes, panel: dict[str, Any], curves: Curves) -> None:
    """The last value, in the colour of its threshold."""
    [points] = curves.values()
    last = [*points.values()][-1]
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ())
    reached = [step["color"] for step in steps if last >= (step["value"] or 0)]
    colour = COLOURS[3] if "red" in reached else COLOURS[0]
    axes.axis("off")
    rounded = round(last, panel["fieldConfig"]["defaults"].get("decimals", 3))
    axes.text(0, 0.1, unit(panel)(rounded), size=20, color=colour)


def time_series(axes: Axes, panel: dict[str, Any], curves: Curves) -> None:
    custom = panel["fieldConfig"]["defaults"]["custom"]
    below: defaultdict[int, float] = defaultdict(float)  # where values are stacked
    for name, points in curves.items():
        seconds, values = list(points), list(points.values())
        if custom.get("drawStyle") == "bars":
            axes.bar(seconds, values, width=1.0, alpha=0.6, label=name)
            continue
        if custom.get("stacking"):
            bottom = [below[second] for second in seconds]
            values = [low + value for low, value in zip(bottom, values, strict=True)]
            below |= dict(zip(seconds, values, strict=True))
            axes.fill_between(seconds, bottom, values, alpha=0.25)
        axes.plot(seconds, values, linewidth=1, label=name)
    if custom.get("scaleDistribution"):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter(unit(panel))
        axes.tick_params(axis="y", which="minor", labelsize=6)
    axes.yaxis.set_major_formatter(unit(panel))
    axes.set_xlim(0, LASTS_S)
    axes.xaxis.set_major_formatter(lambda second, _: f"{second:.0f} s")
    if not curves:
        axes.text(LASTS_S / 2, 0.5, panel["fieldConfig"]["defaults"]["noValue"], ha="center")
    else:
        columns = 2 if panel["gridPos"]["w"] < 12 else 5
        axes.legend(ncols=columns, frameon=False, loc="upper left", bbox_to_anchor=(-0.05, -0.13))


def unit(panel: dict[str, Any]) -> Formatter:
    return UNITS[panel["fieldConfig"]["defaults"]["unit"]]


if __name__ == "__main__":
    main()
