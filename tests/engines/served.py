"""What test_vllm_served.py runs in a process of its own: an AsyncLLM and its trainer."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from deltasync import SenderOptions
from deltasync.errors import DeltaSyncError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import AsyncClient, VllmServer
from deltasync.transports import shared_memory
from deltasync.transports.base import Frame
from tests.engines.checkpoints import Weights

SHORT = {"prompt_token_ids": list(range(3, 20))}


class Request:
    """A long request, token by token."""

    def __init__(self, engine: Any, prompt: Any = SHORT) -> None:
        self._engine, self._prompt, self.num_tokens = engine, prompt, 0
        self.latest: Any = None
        self.num_cached = 0

    async def run(self, count: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        name = uuid.uuid4().hex
        async for output in self._engine.generate(self._prompt, sampling, request_id=name):
            self.latest, self.num_cached = output.outputs[0], output.num_cached_tokens
            self.num_tokens = len(self.latest.token_ids)

    def wait_for_next(self) -> None:
        """Called from another thread than that of the event loop."""
        seen, deadline = self.num_tokens, time.monotonic() + 30
        while self.num_tokens == seen:
            assert time.monotonic() < deadline, "no token came"
            time.sleep(0.001)


class Patient(shared_memory.Sender):
    """Waits for a token of a request before each payload."""

    request: Request | None = None
    num_sent = 0

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        if self.request is not None and frame.payload is not None:
            self.request.wait_for_next()
            self.num_sent += 1
        super().send(frame, timeout_s=timeout_s)


async def begun(engine: Any, count: int) -> tuple[Request, asyncio.Task[None]]:
    """A request for so many tokens, of which some have come."""
    request = Request(engine)
    running = asyncio.create_task(request.run(count))
    while not request.num_tokens:
        await asyncio.sleep(0.001)
    return request, running


async def serve(folder: Path, weights: dict[str, Tensor]) -> None:
    settings: dict[str, Any] = {
        "weight_transfer_config": {"backend": "deltasync"},
        "skip_tokenizer_init": True,
        "worker_extension_cls": "tests.engines.faults.Faults",
    }
    weights = {name: tensor.float() for name, tensor in weights.items()}
    arguments = AsyncEngineArgs(  # in bf16 the best two tokens are often as good, in any order
        model=str(folder), dtype="float32", enforce_eager=True, max_num_seqs=4, **settings
    )
    engine = AsyncLLM.from_engine_args(arguments)
    client = AsyncClient(engine, asyncio.get_running_loop())
    transport, source = Patient(folder / "socket"), Weights(weights)
    options = SenderOptions(bucket_bytes=1 << 18)
    sync = EngineSync(source, VllmServer(client), transport, paused=client.paused, options=options)
    with sync:
        await asyncio.to_thread(sync.connect)
        await asyncio.to_thread(sync.send_weights)
        await tokens_come_while_a_version_is_staged(engine, sync, transport, source)
        await tokens_are_of_the_old_weights_and_then_of_the_new(engine, sync, source)
        await a_version_that_changes_nothing_is_named_and_drops_nothing(engine, sync)
        for where in ("begin", "write", "undo", "end"):
            await an_update_that_fails_pauses_until_the_next(engine, sync, source, where)
    engine.shutdown()


async def tokens_come_while_a_version_is_staged(
    engine: Any, sync: EngineSync, transport: Patient, source: Weights
) -> None:
    request, running = await begun(engine, 500)
    transport.request = request
    change(source, 1.5)
    stats = await asyncio.to_thread(sync.send_weights)
    transport.request = None
    assert transport.num_sent == stats.num_buckets > 5  # a token before each of them
    await running
    spans = [(span.version, span.start, span.end) for span in request.latest.weight_versions]
    assert [version for version, *_ in spans] == ["1", "2"]
    assert spans[0][2] == spans[1][1] > transport.num_sent
    assert spans[1][2] == 500


async def tokens_are_of_the_old_weights_and_then_of_the_new(
    engine: Any, sync: EngineSync, source: Weights
) -> None:
    """Of requests in all stages: of which prompts are computed in chunks, and that generate."""
    prompts = [{"prompt_token_ids": list(range(3 + n, 20 + 40 * n))} for n in range(4)]
    old = await asyncio.gather(*(answer(engine, prompt, 400) for prompt in prompts))
    requests = [Request(engine, prompt) for prompt in prompts]
    running = [asyncio.create_task(request.run(400)) for request in requests]
    while any(request.num_tokens < 10 for request in requests):
        await asyncio.sleep(0.001)
    change(source, 1.5)
    await asyncio.to_thread(sync.send_weights)
    await asyncio.gather(*running)
    for prompt, before, request in zip(prompts, old, requests, strict=True):
        tokens, spans = list(request.latest.token_ids), request.latest.weight_versions
        count = spans[0].end
        assert [int(span.version) for span in spans] == [
            sync.sender.version - 1,
            sync.sender.version,
        ]
        assert 10 <= count < 400
        assert tokens[:count] == before[:count]
        ids = prompt["prompt_token_ids"] + tokens[:count]
        after = await answer(engine, {"prompt_token_ids": ids}, 400 - count)
        assert tokens[count:] == after
        assert after != before[count:]


async def a_version_that_changes_nothing_is_named_and_drops_nothing(
    engine: Any, sync: EngineSync
) -> None:
    prompt = {"prompt_token_ids": list(range(5, 305))}
    before = await answer(engine, prompt)
    request, running = await begun(engine, 400)
    for _ in range(3):
        stats = await asyncio.to_thread(sync.send_weights)
        assert stats.nnz == 0
        assert await engine.get_weight_version() == str(stats.version)
    again = Request(engine, prompt)
    await again.run(12)
    assert again.num_cached > 200
    assert list(again.latest.token_ids) == before
    await running
    assert request.num_tokens == 400
    versions = [int(span.version) for span in request.latest.weight_versions]
    assert versions == list(range(versions[0], stats.version + 1))


async def an_update_that_fails_pauses_until_the_next(
    engine: Any, sync: EngineSync, source: Weights, where: str
) -> None:
    """Requests wait meanwhile, and no token is of a mixture."""
    held = await engine.get_weight_version()
    request, running = await begun(engine, 300)
    await engine.collective_rpc("fail", args=(where,))
    change(source, 0.9)
    with pytest.raises(DeltaSyncError) as caught:
        await asyncio.to_thread(sync.send_weights)
    assert "planted" in f"{caught.value} {getattr(caught.value, '__notes__', '')}", where
    assert await engine.is_paused()
    assert await engine.get_weight_version() == held
    count = request.num_tokens
    await asyncio.sleep(0.3)
    assert request.num_tokens == count < 300
    stats = await asyncio.to_thread(sync.send_weights)
    assert stats.receivers == 1
    assert not await engine.is_paused()
    assert await engine.get_weight_version() == str(stats.version)
    await running
    assert request.num_tokens == 300
    spans = request.latest.weight_versions
    assert [span.version for span in spans] == [held, str(stats.version)]


def change(source: Weights, factor: float) -> None:
    for tensor in source.weights.values():
        tensor.view(-1)[::3] *= factor


async def answer(engine: Any, prompt: Any, count: int = 12) -> list[int]:
    """The tokens that follow a prompt."""
    request = Request(engine, prompt)
    await request.run(count)
    return list(request.latest.token_ids)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), load_file(Path(sys.argv[1]) / "model.safetensors")))
