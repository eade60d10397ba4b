"""A vLLM that runs in one of its ways, and requests that it answers meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, Self

from deltasync.errors import DeltaSyncError
from deltasync.integrations.http import Http
from deltasync.integrations.vllm import AsyncClient, HttpClient, OfflineClient
from tests.engines.offline import SHORT, engine_settings, stop, tokens
from tests.worlds.ranks import free_port

_START_S, _END_S = 200.0, 30.0
_CLIENTS, _LENGTH = 6, 120
_PROMPTS = [one["prompt_token_ids"] for one in SHORT]


class Live(Protocol):
    """A running engine.

    Attributes:
        client: Reaches its workers.
        pausing: Arguments of an EngineSync that pauses it.
    """

    client: Any
    pausing: dict[str, Any]

    def ask(self, prompt: list[int], count: int = 12) -> list[int]:
        """Return the greedy tokens that follow a prompt."""

    def close(self) -> None: ...


class Offline:
    """An `LLM` in this process."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(model=str(folder), **engine_settings(settings))
        self.client, self.pausing = OfflineClient(self.llm), dict[str, Any]()

    def ask(self, prompt: list[int], count: int = 12, **others: Any) -> list[int]:
        return tokens(self.llm, [{"prompt_token_ids": prompt}], count, **others)[0]

    def close(self) -> None:
        stop(self.llm)


class Asynchronous:
    """An `AsyncLLM`, whose event loop is a thread of this process."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._engine = self._wait(_opened(folder, engine_settings(settings)))
        self.client = AsyncClient(self._engine, self._loop)
        self.pausing = {"paused": self.client.paused}

    def ask(self, prompt: list[int], count: int = 12) -> list[int]:
        return list(self._wait(self._answer(prompt, count)))

    async def _answer(self, prompt: list[int], count: int) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        asked, name, found = {"prompt_token_ids": prompt}, uuid.uuid4().hex, list[int]()
        async for output in self._engine.generate(asked, sampling, request_id=name):
            found = list(output.outputs[0].token_ids)
        return found

    def _wait(self, call: Any) -> Any:
        answer: Future[Any] = asyncio.run_coroutine_threadsafe(call, self._loop)
        return answer.result(_START_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._engine.shutdown)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _opened(folder: Path, settings: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **settings))


class Server:
    """A `vllm serve`, which ends with the process group of this process."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        port, self._model = free_port(), str(folder)
        command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self._model, "--port", str(port), *_flags(engine_settings(settings))]
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
        self._process = subprocess.Popen(command, env=environment)
        url = f"http://127.0.0.1:{port}"
        self._http, self.client = Http(url), HttpClient(url)
        self.pausing = {"paused": self.client.paused}
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self._http.get("health")
                return
            except DeltaSyncError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise
                time.sleep(0.5)

    def ask(self, prompt: list[int], count: int = 12) -> list[int]:
        asked = {"model": self._model, "prompt": prompt, "max_tokens": count, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        [choice] = self._http.post("v1/completions", asked)["choices"]
        return list(choice["token_ids"])

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _flags(settings: dict[str, Any]) -> list[str]:
    """Settings of an engine as arguments of its server."""
    found: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


WAYS: dict[str, Callable[[Path, dict[str, Any]], Live]] = {
    "LLM": Offline,
    "AsyncLLM": Asynchronous,
    "vllm serve": Server,
}


class Clients:
    """Threads that ask an engine all the time, within the `with` block."""

    def __init__(self, live: Live) -> None:
        self._live, self._is_ending = live, False
        self.failures: list[str] = []
        self.seconds: list[float] = []
        self._threads = [Thread(target=self._run, args=(n,)) for n in range(_CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        prompt = _PROMPTS[number % len(_PROMPTS)]
        while not self._is_ending:
            began = time.monotonic()
            try:
                found = self._live.ask(prompt, _LENGTH)
            except Exception as error:  # noqa: BLE001 the case tells
                self.failures.append(f"{type(error).__name__}: {error}")
                return
            self.seconds.append(time.monotonic() - began)
            if len(found) != _LENGTH:
                self.failures.append(f"{len(found)} tokens of {_LENGTH}")

    def found(self) -> dict[str, Any]:
        slowest = max(self.seconds, default=0.0)
        return {"requests": len(self.seconds), "failures": self.failures, "slowest_s": slowest}
