"""Two servers behind one sender: requests go on, and a server that is killed is caught up."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from safetensors.torch import load_file

from deltasync import SyncStats
from deltasync.errors import DeltaSyncError
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines import sglang_server, test_vllm_served
from tests.engines.checkpoints import Weights, write_config, write_model
from tests.engines.environment import use_sglang
from tests.worlds.ranks import free_port

pytestmark = pytest.mark.timeout(900)  # three servers start

NUM_TOKENS = 60


class Vllm:
    def __init__(self, model: Path, patch: pytest.MonkeyPatch) -> None:
        self._model, self._patch = model, patch

    def served(self, port: int) -> AbstractContextManager[str]:
        return test_vllm_served.served(self._model, self._patch, packs=False, port=port)

    def add(self, fleet: EngineFleet, url: str) -> None:
        client = HttpClient(url, timeout_s=180)
        fleet.add(VllmServer(client), workers=client.workers(), paused=client.paused)

    def tokens(self, url: str, prompt: int = 17) -> Any:
        asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        asked["prompt"] = list(range(3, 3 + prompt))
        return test_vllm_served.answer(url, self._model, **asked)


class Sglang:
    def __init__(self, model: Path, patch: pytest.MonkeyPatch) -> None:
        use_sglang(patch)
        self._model, self._weights = model, load_file(model / "model.safetensors")

    def served(self, port: int) -> AbstractContextManager[str]:
        folder = self._model / str(port)  # it writes the checkpoint, which others read
        folder.mkdir(exist_ok=True)
        shutil.copy(self._model / "config.json", folder)
        return sglang_server.served(folder, self._weights, port=port)

    def add(self, fleet: EngineFleet, url: str) -> None:
        server = SglangServer(url, timeout_s=180)
        fleet.add(server, workers=server.workers, paused=server.paused)

    def tokens(self, url: str, prompt: int = 17) -> Any:
        return sglang_server.generate(Http(url), NUM_TOKENS, prompt=prompt)["output_ids"]


@dataclass
class Requests:
    """Requests to one server, one after the other, until `ends`."""

    kind: Vllm | Sglang
    url: str
    ends: Event
    answered: int = 0
    errors: list[DeltaSyncError] = field(default_factory=list)

    def run(self) -> None:
        while not self.ends.is_set():
            try:
                self.kind.tokens(self.url, 10 + self.answered % 7)
                self.answered += 1
            except DeltaSyncError as error:
                self.errors.append(error)
                time.sleep(0.2)


@contextmanager
def asked(kind: Vllm | Sglang, *urls: str) -> Iterator[list[Requests]]:
    """Clients of servers."""
    ends = Event()
    clients = [Requests(kind, url, ends) for url in urls]
    with ThreadPoolExecutor(len(urls)) as pool:
        running = [pool.submit(client.run) for client in clients]
        try:
            yield clients
        finally:
            ends.set()
    assert [one.result() for one in running] == [None for _ in clients]


def await_answers(*clients: Requests) -> None:
    """Until each has had another two: one of them was asked for after this was called."""
    deadline, wanted = time.monotonic() + 240, [client.answered + 2 for client in clients]
    while any(client.answered < count for client, count in zip(clients, wanted, strict=True)):
        assert time.monotonic() < deadline, [client.errors for client in clients]
        time.sleep(0.05)


@pytest.mark.promise(
    "Time",
    "Requests to a vLLM or SGLang server go on while another one of its fleet is killed, "
    "restarted and caught up.",
)
@pytest.mark.parametrize("made", [Vllm, Sglang])
def test_requests_go_on_while_another_server_is_killed_and_restarted(
    made: type[Vllm | Sglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_config("LlamaForCausalLM", tmp_path)
    write_model(model)
    kind, source = made(model, monkeypatch), Weights(load_file(model / "model.safetensors"))
    ports = free_port(), free_port()
    link = shared_memory.Sender(model / "socket")
    with ExitStack() as stack, ExitStack() as mortal:
        with ThreadPoolExecutor(2) as pool:  # to start takes a minute, most of which is imports
            starts = zip((stack, mortal), map(kind.served, ports), strict=True)
            sound, other = pool.map(lambda start: start[0].enter_context(start[1]), starts)
        fleet = stack.enter_context(EngineFleet(source, link, pauses="rolling", timeout_s=180))
        for url in (sound, other):
            kind.tokens(url)  # the first step compiles, and no update is made meanwhile
            kind.add(fleet, url)
        stats = fleet.send_weights()
        assert (stats.full_synced, stats.joined, stats.lost) == (0, 2, {})
        first, second = stack.enter_context(asked(kind, sound, other))

        def step() -> SyncStats:
            for tensor in source.weights.values():
                tensor.view(-1)[::3] *= 1.25
            return fleet.send_weights()

        answers = [kind.tokens(sound)]
        for _ in range(5):
            stats = step()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 2, {})
            answers.append(kind.tokens(sound))
            assert kind.tokens(other) == answers[-1]
            await_answers(first, second)
        assert answers[0] != answers[-1]
        assert (first.errors, second.errors) == ([], [])

        mortal.close()  # kill -9
        for _ in range(3):
            assert list(step().lost) == [other]
            await_answers(first)
        assert fleet.servers()[sound].state == "current"
        assert second.errors

        mortal.enter_context(kind.served(ports[1]))
        deadline = time.monotonic() + 120
        while step().lost:
            assert time.monotonic() < deadline, fleet.servers()
        count = len(second.errors)
        for _ in range(2):
            assert kind.tokens(other) == kind.tokens(sound)
            await_answers(first, second)
            assert step().receivers == 2
        assert (first.errors, len(second.errors)) == ([], count)
