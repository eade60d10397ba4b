"""vLLM with its engine in processes of its own: AsyncLLM, `vllm serve`, and the examples."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from deltasync.errors import EngineFailed, PeerLost
from deltasync.integrations.http import Http
from tests.engines.checkpoints import write_config, write_model
from tests.engines.environment import ROOT, use_cpu

EXAMPLES = ROOT / "docs" / "examples"
TIMEOUT_S = 280

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


class Program:
    """A process that has processes of its own: all of them end with the `with` block."""

    def __init__(self, *command: object) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *map(str, command)],
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """What it has printed so far."""
        self._output.seek(0)
        return self._output.read()

    def wait(self) -> str:
        """What it prints until it has ended well."""
        code = self._process.wait(TIMEOUT_S)
        assert code == 0, self.output()
        return self.output()


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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
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


def wait_until_up(server: Http, program: Program) -> None:
    deadline = time.monotonic() + 150
    while True:
        try:
            server.get("health")
            return
        except PeerLost:
            is_hopeless = not program.is_running() or time.monotonic() > deadline
            assert not is_hopeless, program.output()
            time.sleep(0.5)
