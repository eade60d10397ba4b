"""vLLM with its engine in processes of its own: AsyncLLM, `vllm serve`, and the examples."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltasync.errors import ConfigError, EngineTaken
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, write_config, write_model
from tests.engines.environment import ROOT, use_cpu
from tests.engines.programs import TIMEOUT_S, Program, wait_until_up
from tests.worlds.ranks import free_port

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


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Each token of vLLM is of one version, and requests go on over an update.",
)
@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A vLLM whose update failed stays paused until one succeeds, even if the trainer dies.",
)
@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A version that changes nothing is named without a pause, and cached prefixes stay.",
)
@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Requests continue while versions arrive.",
)
def test_requests_go_on_while_versions_come(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in flight end before a version is written, with the old weights."""
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_PLUGINS", f"{os.environ['VLLM_PLUGINS']},two_batches")
    text = output_of("-m", "tests.engines.served", model)
    assert re.search("[12] steps in flight", text)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("vllm_offline.py", r"v1: 0.0000% .*v2: .*v3: "),
        ("vllm_async.py", r"tokens 0 to \d+ are of v\d+\n.* to 200 are of v\d+"),
    ],
)
def test_the_examples_without_a_server(
    example: str, said: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=True)
    text = output_of(EXAMPLES / example, model)
    assert re.search(said, text, re.DOTALL), text


@contextmanager
def served(
    model: Path, monkeypatch: pytest.MonkeyPatch, *, packs: bool, port: int | None = None
) -> Iterator[str]:
    """The address of a `vllm serve`."""
    use_cpu(monkeypatch, packs=packs)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    port = port or free_port()
    backend = ["--weight-transfer-config", '{"backend": "deltasync"}']
    serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port, *backend]
    with Program(*serve) as program:
        wait_until_up(Http(f"http://127.0.0.1:{port}"), program)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Each update drops what the old weights computed.",
)
def test_a_server_drops_what_old_weights_made_and_says_why_it_declines(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(model, monkeypatch, packs=False) as url:
        client = HttpClient(url)
        server = VllmServer(client)
        strange = Weights({"lm_head.weight": torch.zeros(3, 4)})
        with (
            EngineSync(strange, server, shared_memory.Sender(model / "strange")) as sync,
            pytest.raises(ConfigError, match=r"^the loader cannot be watched: at 'lm_head.weight'"),
        ):
            sync.connect()
        source, link = Weights(load_file(model / "model.safetensors")), model / "socket"
        with EngineSync(source, server, shared_memory.Sender(link), paused=client.paused) as sync:
            sync.send_weights()
            assert server.reach(client.paused)  # each update is one call
            before = answer(url, model)
            for tensor in source.weights.values():
                tensor.view(-1)[::3] *= 1.5
            assert sync.send_weights().kind == "delta"
            after = answer(url, model)
            assert after != before
            assert after == answer(url, model, cache_salt="nothing is cached with this")


def test_a_second_trainer_of_a_server_is_told_who_has_it_and_may_take_it_over(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(name: str, *, takes_over: bool) -> EngineSync:
        client = HttpClient(url)
        source = Weights(load_file(model / "model.safetensors"))
        link = shared_memory.Sender(model / name)
        return EngineSync(
            source, VllmServer(client), link, paused=client.paused, take_over=takes_over
        )

    with served(model, monkeypatch, packs=False) as url, ExitStack() as stack:
        first, second, third = (
            stack.enter_context(trainer(name, takes_over=name == "third"))
            for name in ("first", "second", "third")
        )
        first.send_weights()
        for call in (second.connect, second.send_weights):
            with pytest.raises(EngineTaken, match=first.sender.stream_id):
                call()
            assert first.send_weights().kind == "delta"
        third.send_weights()
        with pytest.raises(EngineTaken, match=third.sender.stream_id):
            first.send_weights()
        assert third.send_weights().kind == "delta"
        assert Http(url).get("is_paused") == {"is_paused": False}


def answer(url: str, model: Path, **options: object) -> str:
    """What follows a prompt of which blocks of keys and values are cached."""
    asked = {"model": str(model), "prompt": list(range(3, 303)), "max_tokens": 12, "temperature": 0}
    return str(Http(url).post("v1/completions", asked | options)["choices"][0]["text"])


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Loops that drive vLLM's own trainer interface get the same: engines hold the trainer's "
    "bits after each `send_weights`, which raises if one does not, and the next call covers "
    "that.",
)
def test_the_examples_with_a_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(model, monkeypatch, packs=True) as url:
        text = output_of(EXAMPLES / "vllm_trainer.py", model, url)
        changed = re.findall(r"v(\d): ([\d.]+)% changed", text)
        assert [version for version, _ in changed] == ["1", "2", "3"], text
        assert [share == "0.0000" for _, share in changed] == [True, False, False], text
        assert Http(url).get("weight_info") == {"weight_version": "3"}
        assert Http(url).get("is_paused") == {"is_paused": False}
        text = output_of(EXAMPLES / "vllm_http.py", model, url)
        assert re.search(r"v1: .*v2: 2100 changed.*v3: 2100 changed", text, re.DOTALL), text
        # The trainer has left, and the server does not mind.
        asked = {"model": str(model), "prompt": [5, 6, 7], "max_tokens": 4}
        assert Http(url).post("v1/completions", asked)["usage"]["completion_tokens"] == 4
        assert Http(url).get("weight_info") == {"weight_version": "3"}
