"""What it takes to prove an engine when it first connects, and what its steps add to each commit.

The model is a stand-in whose layers absorb one matrix into another, as those with latent attention
do: what is absorbed has to follow each sync.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.memory import Resident
from benchmarks.engines import Engine, EnginesPlan, Trainer, seconds, target_of
from benchmarks.pair import trim_heap
from benchmarks.record import GOAL_NUMEL, MEMORY, SLOW_DOWN, Result, compared
from deltasync.sync.proof.cold import Startup
from deltasync.sync.proof.proving import Proof, Upkeep

_LAYERS = 12
_MOST_LAYERS = 8  # the memory of so many may a proof take
_DENSITY = 0.01


class Layer(nn.Module):
    """Fused projections, and a matrix that is computed from another one."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        shapes = {"qkv": (3 * width, width), "o": (width, width), "kv_b": (width, width)}
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def absorb(self) -> None:
        """What the engine does once weights are there."""
        self.absorbed = self.get_parameter("kv_b").data.T.contiguous()


class Absorbing(nn.Module):
    """Layers alone. It computes nothing with them."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self._width, self._device = width, device
        self.layers = nn.ModuleList([Layer(width, device) for _ in range(_LAYERS)])

    @property
    def layer_bytes(self) -> int:
        """Of its parameters and what is made of them."""
        return 6 * self._width * self._width * torch.bfloat16.itemsize

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor to where it belongs."""
        for name, tensor in weights:
            layer, _, part = name.rpartition(".")
            live = self.get_submodule(layer).get_parameter("qkv" if part in "qkv" else part).data
            first = "qkv".index(part) * self._width if part in "qkv" else 0
            live.narrow(0, first, self._width).copy_(tensor)

    def checkpoint(self) -> dict[str, Tensor]:
        """Random weights by name."""
        generator = torch.Generator(self._device).manual_seed(0)
        made = {}
        for layer in range(_LAYERS):
            for part in ("q", "k", "v", "o", "kv_b"):
                shape = (self._width, self._width)
                values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
                made[f"layers.{layer}.{part}"] = values.normal_(0, 0.02, generator=generator)
        return made


def run(plan: EnginesPlan) -> Iterator[Result]:
    """All records, as they come."""
    torch.set_num_threads(1)
    for width in plan.proof_widths:
        make = partial(Absorbing, width, plan.device)
        model = make()
        weights = model.checkpoint()
        model.load_weights(weights.items())
        _work_on(list(model.modules()))
        numel = sum(tensor.numel() for tensor in weights.values())
        fields: dict[str, Any] = {
            "numel": numel,
            "parameters": len(weights),
            "model": f"{_LAYERS} layers that absorb, stand-in",
        }
        startup = Startup(make, work_on=_work_on)
        upkeep, results = _proved(model, startup, weights, plan, fields)
        yield from results
        yield _kept_up(model, upkeep, weights, plan, fields)


def _work_on(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, Layer):
            module.absorb()


def _proved(
    model: Absorbing,
    startup: Startup,
    weights: dict[str, Tensor],
    plan: EnginesPlan,
    fields: dict[str, Any],
) -> tuple[Upkeep, list[Result]]:
    """What has to follow each sync; how long the proof takes, and how much memory."""
    target = target_of(model, weights)

    def prove() -> None:
        target.verify_routes(weights.items(), lambda: Proof(model, startup))

    taken = _memory(prove, plan.device)
    samples = defaultdict[str, list[float]](list)
    for _ in range(plan.rounds):
        samples["proof"].append(seconds(prove, plan.device))
        samples["copy"].append(
            seconds(lambda: [tensor.clone() for tensor in weights.values()], plan.device)
        )
    fields = fields | {"density": 1.0, "changed": fields["numel"]}
    timed = compared(
        case="engine_proof",
        samples=samples["proof"],
        baseline_samples=samples["copy"],
        baseline="a copy of all weights",
        ratio_is=SLOW_DOWN,
        goal=None,
        **fields,
    )
    bound = _MOST_LAYERS * model.layer_bytes
    goal = None if fields["numel"] < GOAL_NUMEL else 1.0
    memory = Result(
        case="engine_proof_memory",
        seconds=median(samples["proof"]),
        samples=tuple(samples["proof"]),
        ratio=taken / bound,
        ratio_is=MEMORY,
        goal=goal,
        met=goal is None or taken <= bound,
        bytes=taken,
        bound_bytes=bound,
        **fields,
    )
    assert target.upkeep is not None
    return target.upkeep, [timed, memory]


def _memory(function: Callable[[], None], device: torch.device) -> int:
    """The most bytes that it takes on a GPU, or else on the host."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    trim_heap()
    resident = Resident.start("self")
    function()
    return resident.taken("self")


def _kept_up(
    model: Absorbing,
    upkeep: Upkeep,
    weights: dict[str, Tensor],
    plan: EnginesPlan,
    fields: dict[str, Any],
) -> Result:
    """The pause of a commit that touches all layers, beside one without what has to follow."""
    samples = defaultdict[str, list[float]](list)
    changed = 0
    for _ in range(plan.rounds):
        for way, steps in (("with", upkeep), ("without", None)):
            with closing(Engine(model, Trainer(weights), upkeep=steps)) as engine:
                for _ in range(2):  # buffers grow, kernels are compiled
                    engine.trainer.flip(_DENSITY)
                    stats = engine.sync()
                samples[way].append(stats.receiver_commit_s)
                changed = stats.nnz
    return compared(
        case="engine_upkeep",
        samples=samples["with"],
        baseline_samples=samples["without"],
        baseline="the same without what follows",
        ratio_is=SLOW_DOWN,
        goal=None,
        density=_DENSITY,
        changed=changed,
        **fields,
    )
