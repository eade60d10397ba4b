"""vLLM with its engine in processes of its own: AsyncLLM, `vllm serve`, and the examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltasync.errors import EngineFailed
from deltasync.integrations.http import Http
from deltasync.testing.processes import free_port
from tests.engines.checkpoints import write_config, write_model
from tests.engines.environment import ROOT, use_cpu
from tests.engines.programs import TIMEOUT_S, Program, wait_until_up

EXAMPLES = ROOT / "docs" / "examples"

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def output_of(*command: object) -> str:
    with Program(*command) as program:
        return program.wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_config("LlamaForCausalLM", tmp_path)
    write_model(folder)
    return folder


def test_requests_go_on_while_versions_come(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, packs=False)
    output_of("-m", "tests.engines.served", model)


def test_the_offline_example(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, packs=True)
    text = output_of(EXAMPLES / "vllm_offline.py", model)
    assert re.search(r"v1: 0.0000% .*v2: .*v3: ", text, re.DOTALL), text


def test_the_asynchronous_example(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, packs=True)
    text = output_of(EXAMPLES / "vllm_async.py", model)
    assert re.search(r"tokens 0 to \d+ are of v1\n.* to 200 are of v\d+", text, re.DOTALL), text


def test_the_http_example(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, packs=True)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    port = free_port()
    backend = ["--weight-transfer-config", '{"backend": "deltasync"}']
    serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port, *backend]
    server = Http(f"http://127.0.0.1:{port}")
    with Program(*serve) as program:
        wait_until_up(server, program)
        text = output_of(EXAMPLES / "vllm_http.py", model, f"http://127.0.0.1:{port}")
        assert re.search(r"v1: 0 changed.*v2: 2100 changed.*v3: 2100 changed", text, re.DOTALL), (
            text
        )
        # The trainer has left, and the server does not mind.
        server.post("start_weight_update")
        with pytest.raises(EngineFailed, match="500"):
            server.post("update_weights", {"update_info": {"version": 4}})
        asked = {"model": str(model), "prompt": [5, 6, 7], "max_tokens": 4}
        assert server.post("v1/completions", asked)["usage"]["completion_tokens"] == 4
        assert server.get("weight_info") == {"weight_version": "3"}
