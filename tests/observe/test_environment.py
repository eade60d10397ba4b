"""Workers of engines measure their syncs if their environment says so."""

from __future__ import annotations

import pytest

from tests.worlds.programs import run

_WORKER = """
import sys, tempfile
from pathlib import Path
{before}
from tests.worlds.fleets import engine_of

with tempfile.TemporaryDirectory() as folder, engine_of(Path(folder)) as here:
    here.send()
    here.train()
    here.servers["0"].die()
    here.send()  # the worker connects once more
if "prometheus_client" in sys.modules:
    from prometheus_client import REGISTRY
    value = REGISTRY.get_sample_value
    print(value("deltasync_receiver_syncs_total", {{"kind": "delta"}}))
    print(value("deltasync_receiver_version", {{"receiver": "engine-0[0/1]"}}))
else:
    print("not measured")
"""


def test_a_worker_is_measured_if_it_is_asked_for() -> None:
    pytest.importorskip("prometheus_client")
    done = run(_WORKER.format(before=""), environment={"DELTASYNC_METRICS": "1"})
    assert done.returncode == 0, done.stderr
    syncs, version = done.stdout.split()
    assert float(syncs) >= 1
    assert float(version) >= 2
    assert "there are no metrics" not in done.stderr


def test_a_worker_without_metrics_syncs_and_says_why_there_are_none() -> None:
    hidden = "sys.modules['prometheus_client'] = None"
    code = _WORKER.format(before=hidden).replace('"prometheus_client" in sys.modules', "False")
    done = run(code, environment={"DELTASYNC_METRICS": "1"})
    assert (done.stdout, done.returncode) == ("not measured\n", 0), done.stderr
    assert done.stderr.count("DELTASYNC_METRICS is set, and there are no metrics: ") == 1
