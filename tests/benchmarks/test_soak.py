"""The soak runs on a CPU at toy size: kills, restarts, and the checks that make it fail."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import soak
from benchmarks.__main__ import app
from benchmarks.descriptors import descriptors
from benchmarks.record import Environment
from benchmarks.soak import Usage, grown, growth

ON_CPU = ["soak", "--geometry", "tiny", "--device", "cpu", "--json"]


def test_engines_are_killed_and_replaced_and_both_ends_stay_equal(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    open_before = descriptors()
    options = ["--link", "local", "--syncs", "30", "--kill-every", "10", "--out", str(path)]
    done = CliRunner().invoke(app, [*ON_CPU, *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads(path.read_text())
    assert found["transport"] == "shared memory"
    assert Environment(**found["environment"]).cores
    assert (found["syncs"], found["kills"], found["restarts"]) == (30, 2, 2)
    assert found["full_syncs"] == 3
    assert found["aborted"] == 2
    # Every sync but those that break off is a version; a killed engine may have got one first.
    assert 28 <= found["versions"] <= 31
    assert found["digests_equal"]
    assert found["digests_compared"] == 6
    assert list(found["median_ms"]) == ["0", "0.01", "0.1", "0.3", "1", "5", "20", "100"]
    assert found["failures"] == []
    assert not descriptors() - open_before  # fewer if garbage of other tests was collected


def test_ranks_of_an_engine_are_killed_and_the_others_connect_again() -> None:
    options = ["--ranks", "2", "--link", "collective", "--syncs", "12", "--kill-every", "5"]
    done = CliRunner().invoke(app, [*ON_CPU, *options, "--seed", "4"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["transport"] == "gloo, 2 trainer ranks, 2 engine ranks"
    assert found["kills"] + found["survivors"] == 4
    assert found["survivors"] > 0
    assert found["compared"] == 5
    assert found["failures"] == []


def test_different_bytes_end_it_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: nn.Module) -> str:
        return "not a digest"

    monkeypatch.setattr(soak, "fingerprint", wrong)
    done = CliRunner().invoke(app, [*ON_CPU, "--syncs", "3"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert not found["digests_equal"]
    assert found["failures"] == ["sync 1: SoakFailed: the engine's bytes are not the trainer's"]


def test_a_fingerprint_sees_every_bit() -> None:
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)))
    before = soak.fingerprint(module)
    with torch.no_grad():
        module.get_parameter("p")[3] = -0.0
    assert soak.fingerprint(module) != before


def test_growth_is_from_the_first_sample_to_the_last() -> None:
    samples = [Usage(5, 1, 2, 3), Usage(90, 9, 9, 9), Usage(7, 1, 1, 4)]
    assert growth(samples) == {"rss": 2, "allocated": 0, "reserved": -1, "device": 1}
    assert growth([]) == asdict(Usage(0, 0, 0, 0))


def test_what_has_grown_too_much_is_a_failure() -> None:
    little = {"allocated": 64 << 20, "reserved": -(1 << 40), "device": 0}
    much = {"allocated": 0, "reserved": 0, "device": 65 << 20}
    rss = {"trainer": 200 << 20, "engine": 201 << 20}
    sockets = Counter({"unconnected AF_INET": 9, "thread": 1})  # one for each engine killed
    assert list(grown(rss, {"trainer": little, "engine": much}, sockets)) == [
        f"host memory of the engine grew by {201 << 20} bytes",
        f"GPU memory of the engine (device) grew by {65 << 20} bytes",
        "the trainer has more descriptors or threads: 9 unconnected AF_INET, 1 thread",
    ]
    assert not list(grown({"trainer": 0}, {"trainer": little}, Counter(tcp=1, thread=1)))


def test_descriptors_are_told_apart() -> None:
    with ExitStack() as stack:
        gc.collect()  # what other tests left open is not to be closed meanwhile
        before = descriptors()
        stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(Path(__file__).open(encoding="utf-8"))
        for end in socket.socketpair():
            stack.enter_context(end)
        for number in os.pipe():
            stack.callback(os.close, number)
        stack.enter_context(socket.socket())
        others = Counter([__file__, "unconnected AF_INET"])
        assert descriptors() - before == Counter(tcp=1, unix=2, pipe=2) + others
    assert descriptors() == before
