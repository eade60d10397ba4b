"""A whole SGLang server on the CPU, with deltasync beside it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from deltasync.errors import ConfigError
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


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Each update drops what the old weights computed.",
)
def test_prompts_find_nothing_that_old_weights_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no way of pausing, and with requests that run and wait meanwhile.

    SGLang must not work on its matrices again: no order of ours makes it do so.
    """
    use_sglang(monkeypatch)
    monkeypatch.setenv("TESTED_PROCESSING", "1")
    folder = write_config("LlamaForCausalLM", tmp_path)
    write_model(folder)
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
        with (
            ThreadPoolExecutor(CROWD) as pool,  # more requests than run at a time
            EngineSync(source, server, link, paused=server.paused) as sync,
        ):
            sync.send_weights()
            weights_that_sleep_are_left_alone(http, sync)
            requests_go_on(http, sync, source)
            for number, paused in enumerate(pauses):
                sync._engine.pause.paused = paused
                name = "old" if number % 2 else "new"
                source.take(old if number % 2 else new)
                crowd = range(CROWD if number in (1, 2) else 0)
                requests = [pool.submit(generate, http, LONG) for _ in crowd]
                time.sleep(0.3)
                assert sync.send_weights().kind == "delta"
                assert prompted(http) == tokens[name], (name, number)
                assert all(len(one.result()["output_ids"]) == LONG for one in requests)


def prompted(http: Http) -> list[int]:
    """Tokens of a long prompt."""
    return list(generate(http, prompt=200)["output_ids"])


def weights_that_sleep_are_left_alone(http: Http, sync: EngineSync) -> None:
    """On CPUs their memory stays, and workers are told all the same."""
    for tags in (["weights"], None):
        http.post("release_memory_occupation", {"tags": tags})
        with pytest.raises(ConfigError, match="sleep"):
            sync.send_weights()
        http.post("resume_memory_occupation", {"tags": tags})
        assert sync.send_weights().receivers == 1


def requests_go_on(http: Http, sync: EngineSync, source: Weights) -> None:
    """Across versions, and each of their tokens has one."""
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(generate, http, LONG)
        while not request.done():
            for tensor in source.weights.values():
                tensor.view(-1)[::100] *= 1.01
            latest = sync.send_weights().version
    assert http.get("model_info")["weight_version"] == str(latest)
    meta = request.result()["meta_info"]
    versions = [int(span["version"]) for span in meta["weight_versions"]]
    assert versions == sorted(versions)
    assert 2 < len(versions) <= latest
    assert meta["weight_versions"][-1]["end"] == LONG
