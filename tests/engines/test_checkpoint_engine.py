"""A whole SGLang server that takes a checkpoint of checkpoint-engine's ParameterServer, and deltas.

Both ends of the handshake are checkpoint-engine's code, and SGLang's; what stands in for GPUs is in
plugin/cpu_parameter_server.py.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, write_config, write_model
from tests.engines.environment import ROOT, use_sglang
from tests.engines.programs import TIMEOUT_S, Program
from tests.engines.sglang_server import served
from tests.worlds.ranks import free_port

EXAMPLE = ROOT / "docs" / "examples" / "parameter_server.py"
ON_CPU = """
import runpy, sys
from tests.engines.plugin.cpu_parameter_server import let_parameter_servers_send
let_parameter_servers_send()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
UNKNOWN = ("--load-format", "dummy", "--checkpoint-engine-wait-weights-before-ready")


def is_ready(http: Http) -> bool:
    try:
        http.get("health")
    except EngineFailed as error:
        if error.status != 503:
            raise
        return False
    return True


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, the server's weights are random ones, which show nothing, and are left alone."""
    use_sglang(monkeypatch)
    ranks = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in (ranks | {"TESTED_DEVICE": free_port()}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SGLANG_WAIT_WEIGHTS_READY_TIMEOUT", str(2 * TIMEOUT_S))
    folder = write_config("LlamaForCausalLM", tmp_path)
    write_model(folder)
    weights = load_file(folder / "model.safetensors")
    with served(folder, weights, *UNKNOWN) as url:
        link = shared_memory.Sender(folder / "socket")
        with (
            EngineSync(Weights(weights), SglangServer(url), link) as sync,
            pytest.raises(ConfigError, match="start SGLang on a checkpoint"),
        ):
            sync.connect()
        assert not is_ready(Http(url))
        with Program("-c", ON_CPU, EXAMPLE, folder, url) as program:
            text = program.wait()
        assert re.search(r"v1: 0 changed.*v2: 2100 changed.*v3: 2100", text, re.DOTALL), text
        deadline = time.monotonic() + 20
        while not is_ready(Http(url)):
            assert time.monotonic() < deadline
            time.sleep(0.2)
