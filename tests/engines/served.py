"""What test_vllm_served.py runs in a process of its own: an AsyncLLM and its trainer."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from deltasync import SenderOptions
from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import AsyncClient, VllmServer
from deltasync.transports import shared_memory
from deltasync.transports.base import Frame
from tests.engines.checkpoints import Weights

SHORT = {"prompt_token_ids": list(range(3, 20))}
LONG = {"prompt_token_ids": list(range(3, 303))}  # of which blocks of keys and values are cached


class Request:
    """A long request, token by token."""

    def __init__(self, engine: Any, prompt: Any = SHORT) -> None:
        self._engine, self._prompt, self.num_tokens = engine, prompt, 0
        self.latest: Any = None

    async def run(self, count: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        name = uuid.uuid4().hex
        async for output in self._engine.generate(self._prompt, sampling, request_id=name):
            self.latest = output.outputs[0]
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


async def serve(folder: Path, weights: dict[str, Tensor]) -> None:
    settings = {"weight_transfer_config": {"backend": "deltasync"}, "skip_tokenizer_init": True}
    arguments = AsyncEngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, max_num_seqs=4, **settings
    )
    engine = AsyncLLM.from_engine_args(arguments)
    client = AsyncClient(engine, asyncio.get_running_loop())
    transport, source = Patient(folder / "socket"), Weights(weights)
    await a_model_that_does_not_fit_is_refused(client, folder)
    options = SenderOptions(bucket_bytes=1 << 18)
    sync = EngineSync(source, VllmServer(client), transport, paused=client.paused, options=options)
    with sync:
        await asyncio.to_thread(sync.connect)
        await asyncio.to_thread(sync.send_weights)
        await tokens_come_while_a_version_is_staged(engine, sync, transport, source)
        await prompts_are_computed_with_the_weights_as_they_are(engine, sync, source)
        await a_link_that_is_gone_is_no_crash(engine, sync)
    engine.shutdown()


async def a_model_that_does_not_fit_is_refused(client: AsyncClient, folder: Path) -> None:
    """In the worker's words, which is in another process."""
    strange = Weights({"lm_head.weight": torch.zeros(3, 4)})
    link = shared_memory.Sender(folder / "strange")
    with (
        EngineSync(strange, VllmServer(client), link) as sync,
        pytest.raises(ConfigError, match=r"^the loader cannot be watched: at 'lm_head.weight'"),
    ):
        await asyncio.to_thread(sync.connect)


async def tokens_come_while_a_version_is_staged(
    engine: Any, sync: EngineSync, transport: Patient, source: Weights
) -> None:
    request = Request(engine)
    running = asyncio.create_task(request.run(500))
    while not request.num_tokens:
        await asyncio.sleep(0.01)
    transport.request = request
    for tensor in source.weights.values():
        tensor.view(-1)[::3] *= 1.5
    stats = await asyncio.to_thread(sync.send_weights)
    transport.request = None
    assert transport.num_sent == stats.num_buckets > 5  # a token before each of them
    await running
    spans = [(span.version, span.start, span.end) for span in request.latest.weight_versions]
    assert [version for version, *_ in spans] == ["1", "2"]
    assert spans[0][2] == spans[1][1] > transport.num_sent
    assert spans[1][2] == 500


async def prompts_are_computed_with_the_weights_as_they_are(
    engine: Any, sync: EngineSync, source: Weights
) -> None:
    """Also one whose keys and values were cached, and one that is kept in the pause."""
    before = await answer(engine, LONG)
    kept = Request(engine)
    running = asyncio.create_task(kept.run(400))
    while not kept.num_tokens:
        await asyncio.sleep(0.01)
    for tensor in source.weights.values():
        tensor.view(-1)[::3] *= 0.5
    await asyncio.to_thread(sync.send_weights)
    assert kept.num_tokens < 400
    new = await answer(engine, LONG)
    assert new != before
    assert new == await answer(engine, LONG | {"cache_salt": "nothing is cached with this"})
    await running
    assert kept.num_tokens == 400


async def answer(engine: Any, prompt: Any) -> list[int]:
    """The tokens that follow a prompt."""
    request = Request(engine, prompt)
    await request.run(12)
    return list(request.latest.token_ids)


async def a_link_that_is_gone_is_no_crash(engine: Any, sync: EngineSync) -> None:
    with pytest.raises(Exception, match="does not support draft"):
        await engine.start_draft_weight_update()
    await asyncio.to_thread(sync.disconnect)
    await asyncio.to_thread(sync.disconnect)
    await engine.start_weight_update()
    client = AsyncClient(engine, asyncio.get_running_loop())
    with pytest.raises(Exception, match="no trainer is connected"):
        await asyncio.to_thread(client.update_weights, {"version": 3})
    await Request(engine).run(3)
    stats = await asyncio.to_thread(sync.send_weights)
    assert (stats.receivers, await engine.get_weight_version()) == (1, str(stats.version))


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), load_file(Path(sys.argv[1]) / "model.safetensors")))
