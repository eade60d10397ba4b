"""The commands of docs/integrations/remote.md, over an address of this host, not of loopback."""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path

import pytest

from deltasync.integrations.http import Http
from tests.engines.checkpoints import write_config, write_model
from tests.engines.environment import ROOT, use_cpu
from tests.engines.programs import Program, wait_until_up
from tests.worlds.ranks import free_port

EXAMPLES = ROOT / "docs" / "examples"
REMOTE = EXAMPLES / "vllm_remote.py"

pytestmark = pytest.mark.timeout(900)


def own_address() -> str:
    """Of the interface that leads out of this host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return str(probe.getsockname()[0])


def serve(model: Path, host: str, port: int) -> Program:
    backend = ["--weight-transfer-config", '{"backend": "deltasync"}']
    where = ["--host", host, "--port", port]
    return Program("-m", "vllm.entrypoints.openai.api_server", "--model", model, *where, *backend)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A `vllm serve` across a network serves what a fresh one serves of the trainer's last "
    "checkpoint. `make test-engines`",
)
def test_a_server_across_the_network_serves_what_the_trainer_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=True)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    monkeypatch.setenv("DELTASYNC_SECRET", secrets.token_hex(32))
    host, last = own_address(), tmp_path / "last"
    folder = write_config("LlamaForCausalLM", tmp_path)
    write_model(folder)
    ports = [free_port() for _ in range(3)]
    following, fresh = (f"http://{host}:{port}" for port in ports[:2])
    with serve(folder, host, ports[0]) as program:
        wait_until_up(Http(following), program)
        here = ["--host", host, "--port", ports[2], "--backend", "gloo", "--out", last]
        with Program(REMOTE, folder, following, *here) as trainer:
            text = trainer.wait()
        assert f"1 workers of {following} connected to ('{host}', {ports[2]})" in text
        versions = re.findall(r"1 workers hold v(\d)", text)
        assert versions == ["1", "2", "3", "4"], text
        assert "'weight_version': '5'" in text
        with serve(last, host, ports[1]) as another:
            wait_until_up(Http(fresh), another)
            with Program(EXAMPLES / "vllm_same.py", following, fresh) as compared:
                assert "the same" in compared.wait()
