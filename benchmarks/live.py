"""Syncs of a running vLLM: what they take, and what requests see of them.

Each sync is done in three ways by turns: the update in one call, in several, and in one that keeps
what the old weights computed for requests. The engine is the same; only the trainer's end differs.
The trainer is on the engine's GPU, where their kernels take turns, or on one of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.processes import seeing_gpu
from benchmarks.record import SLOW_DOWN, SPEED_UP, Result, compared
from benchmarks.syncs.geometry import GEOMETRIES, Geometry
from benchmarks.syncs.links import listen
from benchmarks.syncs.plan import TRANSPORTS, Link, Plan
from deltasync import NamedTensor, WeightSource
from deltasync.errors import DeltaSyncError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.trainer_info import Work
from deltasync.integrations.vllm import AsyncClient, HttpClient, OfflineClient, VllmServer
from deltasync.quant.served import ServedSource, served_weights
from tests.engines.quantized import CONFIGS, forms_of
from tests.worlds.ranks import free_port

ENGINES = {
    "AsyncLLM": ("", "AsyncLLM"),
    "serve": ("", "vllm serve"),
    "FP8": ("channel FP8", "AsyncLLM"),
    "LLM": ("", "LLM"),
}
_WAYS = ("one", "several", "kept")
_START_S, _PERIOD_S = 300.0, 1.0
_CACHE_BYTES = 4 << 30  # what engines before have not given back yet is not to be measured
_PROMPT = list(range(3, 35))


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What a run measures.

    Attributes:
        geometry: Key of GEOMETRIES.
        densities: Shares of changed elements; the last is that of syncs at a fixed rate.
        rounds: Times that each way takes its turn.
        requests: How many run at a time.
        paced_s: How long tokens are counted without syncs, and with one each second.
        device: Where the trainer is.
        link: Whether the engine is on the trainer's device, or on the next GPU.
        engines: The form of the checkpoint and how it runs, of each engine; ENGINES by default.
    """

    geometry: str
    densities: tuple[float, ...]
    rounds: int
    requests: int
    paced_s: float
    device: torch.device
    link: Link
    engines: tuple[tuple[str, str], ...]

    @classmethod
    def choose(
        cls, scale: str, device: str | None, link: str | None = None, only: Collection[str] = ()
    ) -> Self:
        """For "full", "quick" or "tiny". `only`: keys of ENGINES; all if empty.

        Raises ValueError for a link that this machine has not.
        """
        engines = tuple(ENGINES[name] for name in only or ENGINES)
        setup = Plan.choose(scale, "qwen3-1.7b", device, link or "local")
        where = setup.device(0)
        if where.type == "cuda":
            is_quick = scale == "quick"
            densities = (0.001, 0.003)
            return cls(
                "qwen3-1.7b",
                densities,
                8 if is_quick else 20,
                8,
                10 if is_quick else 60,
                where,
                setup.link,
                engines,
            )
        rounds, paced_s = {"tiny": (2, 1.0), "quick": (10, 5.0)}.get(scale, (30, 60.0))
        return cls("tiny", (0.001,), rounds, 4, paced_s, where, setup.link, engines)

    @property
    def is_apart(self) -> bool:
        """Whether trainer and engine have a GPU each."""
        return self.link == "collective" and self.device.type == "cuda"

    def model(self, kind: str, form: str) -> str:
        """In records: the engine, and where the trainer is if that is elsewhere."""
        return ", ".join(filter(None, (self.geometry, kind, form, "two GPUs" * self.is_apart)))


class Tokens:
    """When tokens of requests that run all the time came, in the order in which they came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.failures: list[str] = []
        self.is_ending = False

    def between(self, begin: float, end: float) -> list[float]:
        return [at for at in self.times if begin <= at <= end]

    def rate(self, begin: float, end: float) -> float:
        """Tokens in a second."""
        return len(self.between(begin, end)) / (end - begin)

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time without a token in an interval, in seconds."""
        times = [begin, *self.between(begin, end), end]
        return max(later - at for at, later in pairwise(times))


class Turned(VllmServer):
    """A server whose updates go one of `_WAYS`: `way` says which from `connect` on."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._keeping = VllmServer(client, caches="keep")
        self.way = "one"

    def reach(self, paused: Callable[[], object], /) -> int:
        return 0 if self.way == "several" else super().reach(paused)

    def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> None:
        if self.way == "kept":
            self._keeping.switch(version, work, stays_paused, holder)
        else:
            super().switch(version, work, stays_paused, holder)


class Live:
    """A running engine.

    Attributes:
        client: Reaches it.
        calls: How many calls into it there were.
        tokens: Of its requests; none run with an `LLM`.
    """

    def __init__(self, client: Any, count: Callable[[Callable[[], None]], None]) -> None:
        self.client, self.calls, self.tokens = client, 0, Tokens()
        count(self._called)

    def _called(self) -> None:
        self.calls += 1


def run(plan: LivePlan) -> Iterator[Result]:
    """All records, as they come."""
    geometry = GEOMETRIES[plan.geometry]
    opened = {"LLM": _offline, "AsyncLLM": _asynchronous, "vllm serve": _served}
    for form, kind in plan.engines:
        with TemporaryDirectory() as name:
            folder = Path(name)
            trainer = _write_model(geometry, form, folder, plan.device)
            with ExitStack() as stack:
                with seeing_gpu(1) if plan.is_apart else nullcontext():
                    live = stack.enter_context(opened[kind](folder, plan))
                yield from _measured(kind, form, live, trainer, folder, plan)


class Trainer(WeightSource):
    """Weights by checkpoint name."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self._tensors = [NamedTensor((name,), tensor) for name, tensor in weights.items()]
        self._generator = torch.Generator(next(iter(weights.values())).device).manual_seed(1)

    def tensors(self) -> list[NamedTensor]:
        return self._tensors

    def flip(self, density: float) -> dict[str, Tensor]:
        """Change one bit of about a share. int32[n], increasing, by name: which elements."""
        found = {}
        for name, tensor in self.weights.items():
            bits = tensor.view(-1).view(torch.int16)
            count = max(1, round(density * len(bits)))
            drawn = torch.randint(
                len(bits), (count,), generator=self._generator, device=bits.device
            )
            positions = torch.unique(drawn)
            bits[positions] ^= 1
            found[name] = positions.to(torch.int32)
        return found


def config_of(geometry: Geometry) -> dict[str, Any]:
    """As a checkpoint of this shape has it."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": geometry.vocab,
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "intermediate_size": geometry.intermediate,
        "tie_word_embeddings": geometry.tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
    }
    experts = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": geometry.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": geometry.intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return config | experts if geometry.experts else config


def _write_model(geometry: Geometry, form: str, folder: Path, device: torch.device) -> Trainer:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    named = geometry.build(torch.device("cpu")).named_parameters()
    weights = {name: parameter.detach() * 0.05 for name, parameter in named}
    trainer = Trainer({name: tensor.to(device) for name, tensor in weights.items()})
    config = config_of(geometry)
    if form:
        config["quantization_config"] = CONFIGS[form]
        served = served_weights(trainer.weights.items(), forms_of(form))
        weights = {name: tensor.cpu() for name, tensor in served}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return trainer


def _measured(
    kind: str, form: str, live: Live, trainer: Trainer, folder: Path, plan: LivePlan
) -> Iterator[Result]:
    source = ServedSource(trainer, forms_of(form)) if form else trainer
    server = Turned(live.client)
    paused = getattr(live.client, "paused", None)
    options = {} if paused is None else {"paused": paused}
    link, _ = listen(plan.link, plan.device, folder / "link")
    found: dict[tuple[str, float], list[dict[str, float]]] = defaultdict(list)
    with EngineSync(source, server, link, **options) as sync:
        sync.connect()
        sync.send_weights()
        for _ in range(plan.rounds):
            for way in _WAYS:
                server.way = way
                sync.connect()
                sync.send_weights()
                trainer.flip(plan.densities[-1])
                sync.send_weights()  # grows buffers
                for density in (*plan.densities, 0.0):
                    found[way, density].append(_synced(sync, live, trainer, density))
        rates = _paced(sync, server, live, trainer, plan) if live.tokens.times else {}
    if live.tokens.failures:
        raise RuntimeError(f"a request failed: {live.tokens.failures[0]}")
    facts = {
        "numel": sum(tensor.numel() for tensor in trainer.weights.values()),
        "parameters": len(trainer.weights),
        "model": plan.model(kind, form),
        "link": TRANSPORTS[plan.device.type, plan.link],
    }
    for density in (*plan.densities, 0.0):
        ours, theirs = found["one", density], found["several", density]
        parts = {key: median(each[key] for each in ours) for key in ours[0]}
        for way in _WAYS[1:]:
            many = found[way, density]
            parts |= {f"{way}_{key}": median(each[key] for each in many) for key in many[0]}
        yield compared(
            case="live_changed" if density else "live_unchanged",
            samples=[each["total_s"] for each in ours],
            baseline_samples=[each["total_s"] for each in theirs],
            baseline="the update in several calls",
            ratio_is=SLOW_DOWN,
            goal=None,
            density=density,
            changed=int(parts.pop("changed")),
            parts=parts | rates,
            **facts,
        )
    last = found["one", plan.densities[-1]]
    began = time.monotonic()
    live.client.collective_rpc("reload_weights")
    yield compared(
        case="live_reload",
        samples=[median(each["total_s"] for each in last)],
        baseline_samples=[time.monotonic() - began],
        baseline="vLLM's reload of its checkpoint",
        ratio_is=SPEED_UP,
        goal=None,
        density=plan.densities[-1],
        changed=int(last[-1]["changed"]),
        **facts,
    )


def _synced(sync: EngineSync, live: Live, trainer: Trainer, density: float) -> dict[str, float]:
    """What one sync took, and what requests saw of it."""
    if density:
        trainer.flip(density)
    calls, began = live.calls, time.monotonic()
    time.sleep(0.1)
    usual = live.tokens.longest_gap(began, time.monotonic())
    begin = time.monotonic()
    stats = sync.send_weights()
    end = time.monotonic()
    time.sleep(0.05)
    found = {
        "total_s": end - begin,
        "compare_s": stats.diff_s,
        "staging_s": stats.transfer_s,
        "commit_s": stats.commit_s,
        "write_s": stats.receiver_commit_s,
        "calls": float(live.calls - calls),
        "changed": float(stats.nnz),
    }
    if live.tokens.times:
        until = time.monotonic()
        found["gap_s"] = live.tokens.longest_gap(begin, until)
        found["usual_gap_s"] = usual
        found["tokens_per_s"] = live.tokens.rate(begin, until)
    return found


def _paced(
    sync: EngineSync, server: Turned, live: Live, trainer: Trainer, plan: LivePlan
) -> dict[str, float]:
    """Tokens in a second: without syncs, with one each second in two ways, and without again.

    Weights change each second all the time: what changes them takes the engine's GPU, too.
    """
    found = {}
    for key, way in (("before", ""), ("paced", "one"), ("kept_paced", "kept"), ("after", "")):
        if way:
            server.way = way
            sync.connect()
            sync.send_weights()
        began = time.monotonic()
        for number in range(round(plan.paced_s / _PERIOD_S)):
            trainer.flip(plan.densities[-1])
            if way:
                sync.send_weights()
            time.sleep(max(0.0, began + (number + 1) * _PERIOD_S - time.monotonic()))
        found[f"{key}_tokens_per_s"] = live.tokens.rate(began, time.monotonic())
    return found


def _settings(plan: LivePlan) -> dict[str, Any]:
    is_gpu = plan.device.type == "cuda"
    return {
        "dtype": "bfloat16",
        "enforce_eager": not is_gpu,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.4 if is_gpu else 0.1,
        "kv_cache_memory_bytes": _CACHE_BYTES if is_gpu else None,
        "weight_transfer_config": {"backend": "deltasync"},
        "skip_tokenizer_init": True,
    }


def _counted(owner: Any, name: str, called: Callable[[], None]) -> None:
    """Count the calls of one object's method."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        called()
        return method(*args, **kwargs)

    setattr(owner, name, call)


@contextmanager
def _offline(folder: Path, plan: LivePlan) -> Iterator[Live]:
    from vllm import LLM

    llm = LLM(model=str(folder), **_settings(plan))
    core = llm.llm_engine.engine_core
    yield Live(OfflineClient(llm), partial(_counted, core, "call_utility"))
    core.shutdown()


@contextmanager
def _asynchronous(folder: Path, plan: LivePlan) -> Iterator[Live]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    sampling = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True, detokenize=False)

    async def follow(engine: Any, tokens: Tokens, name: str) -> None:
        for number in range(1_000_000):
            prompt = {"prompt_token_ids": _PROMPT}
            async for output in engine.generate(prompt, sampling, request_id=f"{name}-{number}"):
                tokens.times.extend([time.monotonic()] * bool(output.outputs[0].token_ids))
                if tokens.is_ending:
                    return

    async def open_engine() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **_settings(plan)))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engine = asyncio.run_coroutine_threadsafe(open_engine(), loop).result()
    count = partial(_counted, engine.engine_core, "_call_utility_async")
    live = Live(AsyncClient(engine, loop), count)
    running = [
        asyncio.run_coroutine_threadsafe(follow(engine, live.tokens, str(n)), loop)
        for n in range(plan.requests)
    ]
    try:
        yield live
        live.tokens.is_ending = True
        for one in running:
            one.result(60)
    finally:
        engine.shutdown()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def _served(folder: Path, plan: LivePlan) -> Iterator[Live]:
    port, settings = free_port(), _settings(plan)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), "--skip-tokenizer-init", "--dtype", settings["dtype"]]
    command += ["--weight-transfer-config", json.dumps(settings["weight_transfer_config"])]
    command += ["--gpu-memory-utilization", str(settings["gpu_memory_utilization"])]
    command += ["--max-model-len", str(settings["max_model_len"])]
    command += ["--max-num-seqs", str(settings["max_num_seqs"])]
    if settings["kv_cache_memory_bytes"] is not None:
        command += ["--kv-cache-memory-bytes", str(settings["kv_cache_memory_bytes"])]
    command += ["--enforce-eager"] * settings["enforce_eager"]
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        _wait_until_up(url, server)
        client = HttpClient(url)
        live = Live(client, partial(_counted, client._http, "post"))
        threads = [
            threading.Thread(target=_stream, args=(url, str(folder), live.tokens), daemon=True)
            for _ in range(plan.requests)
        ]
        for thread in threads:
            thread.start()
        yield live
        live.tokens.is_ending = True
        for thread in threads:
            thread.join(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        server.wait(60)


def _wait_until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            Http(url).get("health")
            return
        except DeltaSyncError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _stream(url: str, model: str, tokens: Tokens) -> None:
    """Requests one after the other, of which tokens come one by one."""
    asked = {"model": model, "prompt": _PROMPT, "max_tokens": 900, "temperature": 0}
    asked |= {"stream": True, "ignore_eos": True, "return_token_ids": True, "detokenize": False}
    body = json.dumps(asked).encode()
    headers = {"Content-Type": "application/json"}
    try:
        while not tokens.is_ending:
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        tokens.times.append(time.monotonic())
                    if tokens.is_ending:
                        return
    except (OSError, ValueError, HTTPException) as error:
        tokens.failures.append(f"{type(error).__name__}: {error}")
