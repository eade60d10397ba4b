"""A whole SGLang server on the CPU, with deltasync beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltasync.errors import ConfigError, SyncAborted
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, write_config, write_model
from tests.engines.environment import use_sglang
from tests.engines.programs import TIMEOUT_S
from tests.engines.sglang_server import generate, served

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)

LONG = 450
CROWD = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(write_config("LlamaForCausalLM", tmp_path))
    return tmp_path


def test_a_server_without_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices that SGLang must not work on again: no order of ours makes it do so."""
    use_sglang(monkeypatch)
    monkeypatch.setenv("TESTED_PROCESSING", "1")
    old = load_file(folder / "model.safetensors")
    new = changed(old, 0.3, seed=1)
    with served(folder, new) as url:
        expected = generate(Http(url))["output_ids"]
    with served(folder, old) as url:
        http, server = Http(url), SglangServer(url)
        another_model_is_refused(url, folder)
        before = generate(http)["output_ids"]
        assert before != expected
        source = Weights({name: tensor.clone() for name, tensor in old.items()})
        link = shared_memory.Sender(folder / "socket")
        with EngineSync(source, server, link, paused=server.paused) as sync:
            sync.connect()
            assert generate(http)["output_ids"] == before
            assert sync.send_weights().full_synced == 0
            source.take(new)
            assert sync.send_weights().kind == "delta"
            assert generate(http)["output_ids"] == expected
            assert http.get("model_info")["weight_version"] == "2"
            requests_go_on(http, sync, source)
            sync.disconnect()
            source.take(old)
            assert sync.send_weights().full_synced == 1
            assert generate(http)["output_ids"] == before
        assert generate(http)["output_ids"] == before  # disconnected


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Each update drops what the old weights computed.",
)
def test_prompts_find_nothing_that_old_weights_have_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no way of pausing, and with requests that run and wait meanwhile."""
    use_sglang(monkeypatch)
    old = load_file(folder / "model.safetensors")
    new = changed(old, 0.3, seed=1)
    with served(folder, new) as url:
        tokens = {"new": prompted(Http(url))}
    with served(folder, old) as url:
        http, server = Http(url), SglangServer(url)
        tokens["old"] = prompted(http)
        assert tokens["old"] != tokens["new"]
        assert prompted(http) == tokens["old"]
        source = Weights({name: tensor.clone() for name, tensor in old.items()})
        link = shared_memory.Sender(folder / "socket")
        pauses: list[Any] = [
            nullcontext,
            server.paused,
            partial(server.paused, "in_place"),
            partial(server.paused, "abort"),
        ]
        with EngineSync(source, server, link) as sync:
            sync.send_weights()
            for number, paused in enumerate(pauses):
                sync._engine.pause.paused = paused
                name = "old" if number % 2 else "new"
                source.take(old if number % 2 else new)
                requests = crowd(http) if number in (1, 2) else None
                assert sync.send_weights().kind == "delta"
                assert prompted(http) == tokens[name], (name, number)
                if requests is not None:
                    assert [len(ids) for ids in requests()] == [LONG] * CROWD
        keep = SglangServer(url, caches="keep")
        link = shared_memory.Sender(folder / "socket")
        with EngineSync(source, keep, link, paused=keep.paused) as sync:
            source.take(new)
            sync.send_weights()
            assert prompted(http) != tokens["new"]  # what was to be seen


def prompted(http: Http) -> list[int]:
    """Tokens of a long prompt."""
    return list(generate(http, prompt=200)["output_ids"])


def crowd(http: Http) -> Callable[[], list[list[int]]]:
    """More requests than run at a time. Waits until some do; what they have answered."""
    pool = ThreadPoolExecutor(CROWD)
    requests = [pool.submit(generate, http, LONG) for _ in range(CROWD)]
    time.sleep(0.3)
    assert not any(request.done() for request in requests)

    def ended() -> list[list[int]]:
        pool.shutdown()
        return [request.result()["output_ids"] for request in requests]

    return ended


def test_weights_that_are_released_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs their memory stays, and workers are told all the same. Weights that come back as
    others are sent.
    """
    use_sglang(monkeypatch)
    old = load_file(folder / "model.safetensors")
    with served(folder, old) as url:
        http, server = Http(url), SglangServer(url)
        source = Weights({name: tensor.clone() for name, tensor in old.items()})
        link = shared_memory.Sender(folder / "socket")
        with EngineSync(source, server, link, paused=server.paused) as sync:
            sync.send_weights()
            for tags in (["weights"], None):
                http.post("release_memory_occupation", {"tags": tags})
                http.post("resume_memory_occupation", {"tags": tags})
                source.take(changed(source.weights, 0.01, seed=1))
                stats = sync.send_weights()
                assert (stats.kind, stats.full_synced, stats.joined) == ("delta", 0, 0)
            http.post("release_memory_occupation", {"tags": ["weights"]})
            http.post("update_weights_from_disk", {"model_path": str(folder)})  # loses the latest
            source.take(changed(source.weights, 0.01, seed=3))
            with pytest.raises(ConfigError, match="sleep"):
                sync.send_weights()
            http.post("resume_memory_occupation", {"tags": ["weights"]})
            with suppress(SyncAborted):  # unless the worker has seen it before
                sync.send_weights()
            assert sync.send_weights().receivers == 1
            version_now = http.get("model_info")["weight_version"]
            assert version_now == str(sync.sender.version)


def another_model_is_refused(url: str, folder: Path) -> None:
    """By its worker, which goes on."""
    source, link = (
        Weights({"lm_head.weight": torch.zeros(3, 4)}),
        shared_memory.Sender(folder / "a"),
    )
    with (
        EngineSync(source, SglangServer(url), link) as sync,
        pytest.raises(ConfigError, match="lm_head"),
    ):
        sync.connect()
    assert len(generate(Http(url))["output_ids"]) == 12


def requests_go_on(http: Http, sync: EngineSync, source: Weights) -> None:
    """Across versions, and each of their tokens has one."""
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(generate, http, LONG)
        while not request.done():
            for tensor in source.weights.values():
                tensor.view(-1)[::100] *= 1.01
            latest = sync.send_weights().version
    meta = request.result()["meta_info"]
    versions = [int(span["version"]) for span in meta["weight_versions"]]
    assert versions == sorted(versions)
    assert 2 < len(versions) <= latest
    assert meta["weight_versions"][-1]["end"] == LONG
