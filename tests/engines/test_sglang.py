"""A whole SGLang server on the CPU, with deltasync beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
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

LONG = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(write_config("LlamaForCausalLM", tmp_path))
    return tmp_path


@pytest.mark.parametrize("version", [None, "0.5.20"], ids=["sessions", "no sessions"])
def test_a_server_without_configuration(
    version: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that SGLang must not work on again: no order of ours makes it do so."""
    use_sglang(monkeypatch, version)
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


def test_a_server_without_the_plugin_is_told_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_sglang(monkeypatch)
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    weights = load_file(folder / "model.safetensors")
    with served(folder, weights) as url:
        link = shared_memory.Sender(folder / "socket")
        with (
            EngineSync(Weights(weights), SglangServer(url), link) as sync,
            pytest.raises(ConfigError, match="install deltasync in SGLang's environment"),
        ):
            sync.connect()


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
