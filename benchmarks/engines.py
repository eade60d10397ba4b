"""Bringing sparse changes into an engine's model, against the ways that vLLM has for it.

Ours is all that the receiver does from the first frame to its last answer: reading tables, checking
bounds, the undo log, digests before and after. vLLM's are handed tensors. The model
is a stand-in of the layout of vLLM's own; where vLLM is not installed, its file is given by a path.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.record import SPEED_UP, Result, compared
from benchmarks.syncs.fused import Fused
from benchmarks.syncs.geometry import GEOMETRIES, Geometry
from benchmarks.syncs.group import synchronize
from deltasync import (
    CheckpointTensor,
    NamedTensor,
    ReceiverOptions,
    RoutedTarget,
    SyncStats,
    WeightReceiver,
    WeightSender,
    WeightSource,
)
from deltasync.errors import TransportClosed
from deltasync.transports import inprocess
from deltasync.transports.base import Frame

_PAUSE_GOAL, _GOAL_DENSITY = 50.0, 0.003
_WAYS = {"sparse": "vLLM's load_checkpoint_weight_patches", "dense": "load_weights of all"}


@dataclass(frozen=True, slots=True)
class EnginesPlan:
    """What a run measures.

    Attributes:
        geometries: Keys of GEOMETRIES: a plain model, and one of many experts.
        densities: Shares of changed elements.
        rounds: Times that each way takes its turn.
        device: Where the engine and the patches are.
        patch_file: vLLM's checkpoint_weight_patch.py, where vLLM is not installed.
    """

    geometries: tuple[str, ...]
    densities: tuple[float, ...]
    rounds: int
    device: torch.device
    patch_file: Path | None = None

    @classmethod
    def choose(cls, scale: str, device: str | None, patch_file: Path | None) -> Self:
        """For "full", "quick" or "tiny"."""
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if scale == "tiny":
            return cls(("tiny", "tiny-moe"), (0.01,), 2, where, patch_file)
        if where.type == "cuda":
            densities: tuple[float, ...] = (
                (0.003,) if scale == "quick" else (0.001, 0.003, 0.01, 0.05)
            )
            return cls(("qwen3-1.7b", "moe-small"), densities, 5, where, patch_file)
        rounds = 2 if scale == "quick" else 3  # vLLM's sparse way takes 20 s each
        densities = (0.01,) if scale == "quick" else (0.001, 0.01, 0.05)
        return cls(("engine", "engine-moe"), densities, rounds, where, patch_file)


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


class Busy(inprocess.Receiver):
    """Knows for how long nobody waited for a frame.

    Attributes:
        waited_s: How long somebody did, since the last sync.
    """

    waited_s = 0.0

    def receive(self, *, timeout_s: float) -> Frame:
        began = time.perf_counter()
        try:
            return super().receive(timeout_s=timeout_s)
        finally:
            self.waited_s += time.perf_counter() - began


class Engine:
    """A model that follows a trainer, in a thread.

    Args:
        model: It, with a loader.
        trainer: Whom it follows.

    Attributes:
        busy_s: For how long the receiver worked on the last sync.
    """

    def __init__(self, model: Any, trainer: Trainer) -> None:
        self.model, self.trainer = model, trainer
        device = next(iter(trainer.weights.values())).device
        link = inprocess.Sender(device=device)
        target = target_of(model, trainer.weights)
        self.sender = WeightSender(trainer, link)
        self.busy_s, self._link = 0.0, Busy(link)
        options = ReceiverOptions(
            max_staged_bytes=1 << 40,  # so that every pause is one of a commit
            scrub_every=0,  # that is done between syncs, of which the others do nothing
        )
        self._receiver = WeightReceiver(target, self._link, options=options)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        self.sender.wait_for_receivers(1, timeout_s=600)
        self.sender.send_weights(timeout_s=600)

    def close(self) -> None:
        self._receiver.close()
        self._thread.join()
        self.sender.close()

    def sync(self) -> SyncStats:
        self._done.clear()
        stats = self.sender.send_weights(timeout_s=600)
        self._done.wait()
        if stats.lost:
            raise RuntimeError(f"the engine left: {stats.lost}")
        return stats

    def _follow(self) -> None:
        with suppress(TransportClosed):
            while True:
                began, self._link.waited_s = time.perf_counter(), 0.0
                self._receiver.receive_weights(timeout_s=3600)
                self.busy_s = time.perf_counter() - began - self._link.waited_s
                self._done.set()


def run(plan: EnginesPlan) -> Iterator[Result]:
    """All records, as they come."""
    patches = _vllm_patches(plan)
    torch.set_num_threads(1)  # two ends share this process
    for key in plan.geometries:
        geometry = GEOMETRIES[key]
        model = Fused(geometry, plan.device)
        weights = {n: p.detach() for n, p in geometry.build(plan.device).named_parameters()}
        model.load_weights(weights.items())
        with closing(Engine(model, Trainer(weights))) as engine:
            for density in plan.densities:
                yield from _applied(engine, f"{key}, stand-in", density, plan, patches)
        _check(model, weights)


def _applied(
    engine: Engine,
    model_name: str,
    density: float,
    plan: EnginesPlan,
    patches: ModuleType | None,
) -> Iterator[Result]:
    """The same changes by each way in turn. They are absolute values: once is as good as twice."""
    weights, model = engine.trainer.weights, engine.model
    given: list[Any] = []
    ways: dict[str, Callable[[], object]] = {"dense": lambda: model.load_weights(weights.items())}
    if patches is not None:
        ways["sparse"] = lambda: patches.load_checkpoint_weight_patches(model, given)
    samples: dict[str, list[float]] = defaultdict(list)
    engine.trainer.flip(density)
    engine.sync()  # buffers grow, kernels are compiled
    for _ in range(plan.rounds):
        changed = engine.trainer.flip(density)
        stats = engine.sync()
        samples["work"].append(engine.busy_s)
        samples["pause"].append(stats.receiver_commit_s)
        if patches is not None:
            given[:] = [_patch(patches, name, weights[name], changed[name]) for name in weights]
        for way, function in ways.items():
            samples[way].append(seconds(function, plan.device))
    is_judged = plan.device.type == "cuda" and density == _GOAL_DENSITY
    for part, way in product(("work", "pause"), ways):
        yield compared(
            case=f"engine_{part}_over_{way}",
            samples=samples[part],
            baseline_samples=samples[way],
            baseline=_WAYS[way],
            ratio_is=SPEED_UP,
            goal=_PAUSE_GOAL if is_judged and (part, way) == ("pause", "sparse") else None,
            numel=stats.numel,
            parameters=len(weights),
            density=density,
            changed=stats.nnz,
            bytes=stats.receiver_bytes,
            model=model_name,
        )


def target_of(model: Any, weights: dict[str, Tensor]) -> RoutedTarget:
    """A target that takes weights of these names."""
    checkpoint = [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    return RoutedTarget(model, checkpoint)


def _patch(patches: ModuleType, name: str, tensor: Tensor, indices: Tensor) -> Any:
    values = tensor.view(-1)[indices.long()]
    return patches.CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, values, indices)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, with what it leaves to a GPU."""
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - began


def _check(model: Any, weights: dict[str, Tensor]) -> None:
    """Raises unless loading everything changes nothing: the engine has all bits already."""
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    model.load_weights(iter(weights.items()))
    for name, tensor in model.named_parameters():
        if not torch.equal(before[name].view(torch.int16), tensor.view(torch.int16)):
            raise RuntimeError(f"{name} is not what the loader makes of the trainer's weights")


def _vllm_patches(plan: EnginesPlan) -> ModuleType | None:
    """The module with vLLM's sparse way, or None."""
    if plan.patch_file is None:
        name = "vllm.model_executor.model_loader.checkpoint_weight_patch"
        return importlib.import_module(name) if importlib.util.find_spec("vllm") else None
    spec = importlib.util.spec_from_file_location("checkpoint_weight_patch", plan.patch_file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{plan.patch_file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
