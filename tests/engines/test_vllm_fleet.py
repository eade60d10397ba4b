"""Two `vllm serve` behind one sender: requests go on, and one that is killed is caught up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from safetensors.torch import load_file

from deltasync import SyncStats
from deltasync.errors import DeltaSyncError
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.http import Http
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.integrations.vllm_core import UPDATE
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, write_config, write_model
from tests.engines.test_vllm_served import answer, served
from tests.ranks import free_port

pytestmark = pytest.mark.timeout(900)  # three servers start, one after the other


@dataclass
class Requests:
    """Requests to one server, one after the other, until `ends`."""

    url: str
    model: Path
    ends: Event
    answered: int = 0
    errors: list[DeltaSyncError] = field(default_factory=list)

    def run(self) -> None:
        http = Http(self.url, timeout_s=60)
        asked = {"model": str(self.model), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        while not self.ends.is_set():
            prompt = list(range(3, 20 + self.answered % 7))
            try:
                said = http.post("v1/completions", asked | {"prompt": prompt})
                assert said["usage"]["completion_tokens"] == 60
                self.answered += 1
            except DeltaSyncError as error:
                self.errors.append(error)
                time.sleep(0.2)


@contextmanager
def asked(model: Path, *urls: str) -> Iterator[list[Requests]]:
    """Clients of servers."""
    ends = Event()
    clients = [Requests(url, model, ends) for url in urls]
    threads = [Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        ends.set()
        for thread in threads:
            thread.join()


class Killed(HttpClient):
    """Does something before the next call of an update."""

    before: Callable[[], object] | None = None

    def collective_rpc(self, method: str, *args: object) -> Any:
        if method == UPDATE and self.before is not None:
            before, self.before = self.before, None
            before()
        return super().collective_rpc(method, *args)


def test_requests_go_on_while_another_server_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_config("LlamaForCausalLM", tmp_path)
    write_model(model)
    source, port = Weights(load_file(model / "model.safetensors")), free_port()
    link = shared_memory.Sender(model / "socket")
    with ExitStack() as stack, ExitStack() as mortal:
        with ThreadPoolExecutor(2) as pool:  # to start takes a minute, most of which is imports
            servers = [served(model, monkeypatch, packs=False, port=p) for p in (None, port)]
            starts = zip((stack, mortal), servers, strict=True)
            sound, other = pool.map(lambda start: start[0].enter_context(start[1]), starts)
        fleet = stack.enter_context(EngineFleet(source, link, pauses="rolling", timeout_s=60))
        clients = {url: Killed(url, timeout_s=60) for url in (sound, other)}
        for client in clients.values():
            fleet.add(VllmServer(client), workers=client.workers(), paused=client.paused)
        stats = fleet.send_weights()
        assert (stats.full_synced, stats.joined, stats.lost) == (0, 2, {})
        first, second = stack.enter_context(asked(model, sound, other))

        def step() -> SyncStats:
            for tensor in source.weights.values():
                tensor.view(-1)[::3] *= 1.25
            return fleet.send_weights()

        def alike() -> bool:
            return answer(sound, model) == answer(other, model)

        for _ in range(5):
            stats = step()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 2, {})
            assert alike()
            await_answers(first, second)
        assert (first.errors, second.errors) == ([], [])

        clients[other].before = mortal.close  # kill -9, as its turn to write has come
        stats = step()
        assert (stats.receivers, list(stats.lost)) == (1, [other])
        for _ in range(3):
            assert list(step().lost) == [other]
            await_answers(first)
        assert fleet.servers()[sound].state == "current"
        assert second.errors

        mortal.enter_context(served(model, monkeypatch, packs=False, port=port))
        until_s = time.monotonic() + 120
        while step().lost:
            assert time.monotonic() < until_s, fleet.servers()
        assert {state.state for state in fleet.servers().values()} == {"current"}
        assert alike()
        count = len(second.errors)
        assert step().receivers == 2
        await_answers(first, second)
        assert alike()
        assert len(second.errors) == count
        assert first.errors == []
        versions = [Http(url).get("weight_info")["weight_version"] for url in (sound, other)]
        assert versions == 2 * [str(fleet.sender.version)]


def await_answers(*clients: Requests) -> None:
    """Until each has had another two: one of them was asked for after this was called."""
    deadline, wanted = time.monotonic() + 120, [client.answered + 2 for client in clients]
    while any(client.answered < count for client, count in zip(clients, wanted, strict=True)):
        assert time.monotonic() < deadline, [client.errors for client in clients]
        time.sleep(0.05)
