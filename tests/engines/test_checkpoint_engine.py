"""Whole SGLang servers that take checkpoints of checkpoint-engine's ParameterServer, and deltas.

Both ends of the handshake are checkpoint-engine's code, and SGLang's; what stands in for GPUs is in
plugin/cpu_parameter_server.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, write_config, write_model
from tests.engines.environment import ROOT, use_sglang
from tests.engines.programs import TIMEOUT_S, Program
from tests.engines.sglang_server import generate, served
from tests.worlds.ranks import free_port

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)

WAITS = "--checkpoint-engine-wait-weights-before-ready"
EXAMPLE = ROOT / "docs" / "examples" / "parameter_server.py"
ON_CPU = """
import runpy, sys
from tests.engines.plugin.cpu_parameter_server import let_parameter_servers_send
let_parameter_servers_send()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Trainer:
    """Of a server, whose weights it also has as a checkpoint."""

    def __init__(self, url: str, folder: Path, weights: dict[str, Tensor]) -> None:
        self.http, self.url, self.folder = Http(url), url, folder
        self.source = Weights({name: tensor.clone() for name, tensor in weights.items()})

    @contextmanager
    def sync(self, timeout_s: float = 60.0) -> Iterator[EngineSync]:
        server = SglangServer(self.url)
        link = shared_memory.Sender(self.folder / "socket")
        with EngineSync(
            self.source, server, link, paused=server.paused, timeout_s=timeout_s
        ) as sync:
            yield sync

    def bring(self, weights: dict[str, Tensor]) -> str:
        """Let a ParameterServer send a whole checkpoint. What it prints."""
        file = self.folder / "brought.safetensors"
        save_file(weights, file)
        with Program("-m", "tests.engines.parameter_server", file, self.url) as program:
            return program.wait()

    def checksum(self) -> Any:
        return self.http.post("weights_checker", {"action": "checksum"})

    def tokens(self) -> Any:
        return generate(self.http, prompt=200)["output_ids"]

    def is_ready(self, *, within_s: float = 0.0) -> bool:
        deadline = time.monotonic() + within_s
        while True:
            try:
                self.http.get("health")
                return True
            except EngineFailed as error:
                if error.status != 503:
                    raise
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_sglang(monkeypatch)
    monkeypatch.setenv("TESTED_DEVICE", str(free_port()))
    monkeypatch.setenv("SGLANG_WAIT_WEIGHTS_READY_TIMEOUT", str(2 * TIMEOUT_S))
    write_model(write_config("LlamaForCausalLM", tmp_path))
    return tmp_path


def test_deltas_follow_the_checkpoints_of_a_parameter_server(folder: Path) -> None:
    old = load_file(folder / "model.safetensors")
    new = changed(old, 0.3, seed=1)
    with served(folder, old, "--load-format", "dummy", WAITS) as url:
        trainer = Trainer(url, folder, new)
        unknown_weights_are_left_alone(trainer)
        trainer.bring(old)
        assert trainer.is_ready(within_s=20)
        trainer.source.take(old)
        with trainer.sync() as sync:
            assert sync.send_weights().full_synced == 0
            assert trainer.http.get("model_info")["weight_version"] == "1"
            trainer.source.take(new)
            stats = sync.send_weights()
            assert (stats.kind, stats.full_synced) == ("delta", 0)
            expected = trainer.checksum()
            tokens = trainer.tokens()
            trainer.bring(new)  # which clears the cache of prefixes
            assert trainer.tokens() == tokens
            assert trainer.checksum() == expected  # bit for bit
            assert sync.send_weights().full_synced == 0  # it holds them, and connects anew
            trainer.source.take(old)
            assert sync.send_weights().kind == "delta"
            others = trainer.tokens()
            assert others != tokens  # of a prompt that is cached
            trainer.bring(new)  # which the trainer does not hold
            assert trainer.tokens() == tokens
            assert sync.send_weights().full_synced == 1
            assert trainer.tokens() == others
            deltas = trainer.checksum()
            assert deltas != expected
            generate(trainer.http)
            sync.disconnect()
        trainer.bring(old)
        assert trainer.checksum() == deltas


def unknown_weights_are_left_alone(trainer: Trainer) -> None:
    """Random ones, which show nothing."""
    before = trainer.checksum()
    with trainer.sync() as sync, pytest.raises(ConfigError, match="start SGLang on a checkpoint"):
        sync.connect()
    assert trainer.checksum() == before
    assert not trainer.is_ready()


def test_the_example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    weights = load_file(folder / "model.safetensors")
    with served(folder, weights, "--load-format", "dummy", WAITS) as url:
        with Program("-c", ON_CPU, EXAMPLE, folder, url) as program:
            text = program.wait()
        assert re.search(r"v1: 0 changed.*v2: 2100 changed.*v3: 2100", text, re.DOTALL), text
        assert Trainer(url, folder, weights).is_ready(within_s=20)
