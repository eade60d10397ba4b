"""Prometheus metrics: what is counted, under which names, and that labels stay few."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltasync import subscribe
from deltasync.errors import DirtyReceiver, PeerLost
from deltasync.integrations.engine import new_name
from deltasync.integrations.verl_ends import _new_name as rollout_name
from deltasync.sync.events import SyncFailed
from tests.observe.made import failed, published, received, sync
from tests.worlds.links import fleet, random_model, step, until

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from deltasync.observe.metrics import OTHER, Metrics

PAYLOADS = "deltasync_payload_bytes"  # by codec: of use is its rate


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def value(registry: CollectorRegistry) -> Callable[..., float]:
    def found(name: str, **labels: str) -> float:
        sample = registry.get_sample_value(f"deltasync_{name}", labels)
        return -1.0 if sample is None else sample

    return found


def test_real_syncs_are_counted_at_both_ends(
    registry: CollectorRegistry, value: Callable[..., float]
) -> None:
    source = random_model({"w": (64, 4)}, 0)
    with subscribe(Metrics(registry)), fleet(source) as here:
        here.add(random_model({"w": (64, 4)}, 1), engine="x")
        here.wait(1)
        here.sender.send_weights(timeout_s=60)
        step(source, torch.Generator().manual_seed(0), 0.1)
        stats = here.sender.send_weights(timeout_s=60)
        until(lambda: value("receiver_syncs_total", kind="delta") == 1)
    assert value("syncs_total", kind="full") == value("syncs_total", kind="delta") == 1
    assert value("version") == value("engine_version", engine="x") == 2
    assert value("receiver_version", receiver="x[0/1]") == 2
    assert value("receiver_dirty", receiver="x[0/1]") == 0
    assert value("density_ratio") == pytest.approx(stats.density)
    assert value("full_syncs_total") == 1
    assert value("sync_seconds_count") == value("receiver_pause_seconds_count") == 2


def test_each_field_goes_where_it_belongs(
    registry: CollectorRegistry, value: Callable[..., float]
) -> None:
    metrics = Metrics(registry)
    lost = {"b[0/1]": "PeerLost: gone", "c": "no such type: x", "d[0/1]": "Detached: asleep"}
    metrics(sync(lost=lost, warnings=("one",), full_synced=1))
    metrics(failed(lost={"b[0/1]": "PeerLost: gone"}))
    metrics(failed(ValueError("x"), role="publisher"))
    metrics(
        failed(DirtyReceiver("x"), role="receiver", name="a[0/1]", is_dirty=True, corrupted="w")
    )
    metrics(received(name="b[0/1]"))
    metrics(published())
    metrics(failed(receivers=1))
    assert value("receivers") == 1
    assert value("payload_bytes_total", codec="gap") == 500
    assert value("lost_receivers_total", reason="PeerLost") == 2
    assert value("lost_receivers_total", reason=OTHER) == 1
    assert value("warnings_total") == 1
    assert value("failures_total", role="sender", error="SyncAborted") == 2
    assert value("failures_total", role="publisher", error=OTHER) == 1
    assert value("failures_total", role="receiver", error="DirtyReceiver") == 1
    assert value("receiver_scrub_findings_total") == 1
    assert value("receiver_dirty", receiver="a[0/1]") == 1
    assert value("receiver_dirty", receiver="b[0/1]") == 0
    assert value("published_bytes_total", object="anchor") == 2000
    assert value("last_sync_timestamp_seconds") == 1.7e9
    assert value("commit_seconds_bucket", le="0.0005") == 0


def test_the_first_failure_of_a_type_is_an_increase(
    registry: CollectorRegistry, value: Callable[..., float]
) -> None:
    """Prometheus sees none in a counter that begins at 1: alerts would miss it."""
    metrics = Metrics(registry)
    before = {(s.name, *s.labels.items()) for m in registry.collect() for s in m.samples}
    gone = {"a": "PeerLost: x", "b": "Detached: x", "c": "what is that"}
    for error in (PeerLost("x"), OSError("x"), RuntimeError("x"), torch.OutOfMemoryError("x")):
        metrics(failed(error, lost=gone))
        metrics(failed(error, role="publisher"))
        metrics(failed(error, role="receiver", name="a"))
    metrics(sync(kind="full"))
    metrics(received(kind="full"))
    metrics(published(kind="unchanged"))
    counters = [m for m in registry.collect() if m.type == "counter" and m.name != PAYLOADS]
    found = {(s.name, *s.labels.items()) for m in counters for s in m.samples}
    assert found <= before
    assert value("lost_receivers_total", reason="PeerLost") == 4


@pytest.mark.promise(
    "What operators see",
    "Labels of metrics stay few, whatever peers are called and report.",
)
def test_labels_stay_few_whatever_peers_are_called(
    registry: CollectorRegistry, value: Callable[..., float]
) -> None:
    metrics = Metrics(registry)
    for turn in range(400):
        metrics(sync(engines=(f"made-up-{turn}",), lost={"x": f"Error{turn}: y"}))
        metrics(received(name=f"made-up-{turn}[0/1]"))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    for label in ("engine", "receiver"):
        assert len({s.labels[label] for s in samples if label in s.labels}) == 65
    assert value("engine_version", engine=OTHER) == 2
    lost = [s for s in samples if s.name == "deltasync_lost_receivers_total"]
    counted = {s.labels["reason"]: s.value for s in lost}
    assert counted.pop(OTHER) == 400
    assert set(counted.values()) == {0}
    assert len(counted) < 64


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("engine-0123abcd-9f8e7d6c-0", "engine-0"),  # of vLLM
        pytest.param(f"{new_name(new_name('engine-'))}-0", "engine-0", id="as an engine is named"),
        pytest.param(rollout_name(), "rollout", id="as a rollout is named"),
        ("engine-east-0", "engine-east-0"),  # of users
    ],
)
def test_the_generated_part_of_a_name_is_left_out(
    value: Callable[..., float], registry: CollectorRegistry, name: str, label: str
) -> None:
    metrics = Metrics(registry)
    metrics(sync(engines=(name,)))
    metrics(received(name=f"{name}[1/2]"))
    assert value("engine_version", engine=label) == 2
    assert value("receiver_version", receiver=f"{label}[1/2]") == 2


def dirty(name: str) -> SyncFailed:
    return failed(DirtyReceiver("x"), role="receiver", name=name, is_dirty=True)


def test_a_receiver_is_dirty_until_it_syncs_also_under_a_new_name(
    value: Callable[..., float], registry: CollectorRegistry
) -> None:
    metrics = Metrics(registry)
    metrics(dirty("engine-00000000-cafe0123-0[0/1]"))
    metrics(received(name="engine-1[0/1]"))
    assert value("receiver_dirty", receiver="engine-0[0/1]") == 1
    assert value("receiver_dirty", receiver="engine-1[0/1]") == 0
    metrics(received(name="engine-00000002-cafe0123-0[0/1]"))
    assert value("receiver_dirty", receiver="engine-0[0/1]") == 0


def worker(number: int) -> None:
    """A process in multiprocess mode, and a child that it forks."""
    metrics = Metrics(CollectorRegistry())
    name = f"engine-0[{number}/2]"
    metrics(received(name=name, version=5 + number))
    pid = os.fork()
    if pid == 0:
        metrics(failed(DirtyReceiver("x"), role="receiver", name=name))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    metrics(received(name=name, version=7 + number))
    metrics(sync(engines=("a",), version=9))
    metrics(received(name="store[0/1]") if number else dirty("store[0/1]"))


@pytest.mark.promise(
    "What operators see",
    "Metrics of several processes, and of their forks, add up.",
)
def test_processes_and_their_forks_add_up_in_multiprocess_mode(
    tmp_path: Path,
) -> None:
    """PROMETHEUS_MULTIPROC_DIR is read as prometheus_client is imported: in new processes."""
    code = "import sys; from tests.observe.test_metrics import worker; worker(int(sys.argv[1]))"
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    numbers = []
    for number in range(2):
        command = [sys.executable, "-W", "error::UserWarning", "-c", code, str(number)]
        with subprocess.Popen(command, env=environment) as process:
            assert process.wait(timeout=120) == 0
        numbers.append(process.pid)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))  # type: ignore[no-untyped-call]
    value = registry.get_sample_value
    assert value("deltasync_receiver_syncs_total", {"kind": "delta"}) == 5
    assert value("deltasync_failures_total", {"role": "receiver", "error": "DirtyReceiver"}) == 3
    assert value("deltasync_receiver_pause_seconds_count") == 5
    for number in range(2):
        labels = {"receiver": f"engine-0[{number}/2]"}
        assert value("deltasync_receiver_version", labels) == 7 + number
    assert value("deltasync_engine_version", {"engine": "a"}) == 9
    dirty_store = "deltasync_receiver_dirty", {"receiver": "store[0/1]"}
    assert value(*dirty_store) == 1, "the one that is not dirty has spoken last"
    mark_process_dead(numbers[0], str(tmp_path))  # type: ignore[no-untyped-call]
    assert value(*dirty_store) == 0
