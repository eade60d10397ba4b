"""Optimizers whose steps do not reach what is sent: refused or named when the hook is made."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    NamedTensor,
    SenderOptions,
    WeightSource,
    sync_after_step,
)
from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from deltasync.quant.fp8 import Fp8
from deltasync.quant.served import ServedSource
from deltasync.transports import shared_memory
from tests.worlds.links import bits_equal, fleet
from tests.worlds.trainers import Trainer as SourcesOfRanks


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, **settings)


def train(module: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    module(torch.randn(4, 8, dtype=dtype)).float().square().sum().backward()


class MasterWeights(torch.optim.Optimizer):
    """Keeps float32 masters, and copies them into the model after its inner optimizer's step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = list(model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.model]
        self.optimizer = adamw(self.masters)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, parameter in zip(self.masters, self.model, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model, strict=True):
                parameter.copy_(master)


class Masters:
    """The same, and no optimizer of torch, as Megatron's and DeepSpeed's."""

    def __init__(self, inner: MasterWeights) -> None:
        self.step = inner.step


def frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def matrices(name: str, shape: tuple[int, ...]) -> Fp8 | None:
    return Fp8() if len(shape) > 1 else None


STRANGERS: dict[str, Callable[[nn.Module], tuple[WeightSource, torch.optim.Optimizer]]] = {
    "a copy is trained": lambda m: (ModuleSource(m), adamw(copy.deepcopy(m).parameters())),
    "the frozen base is sent": lambda m: (ModuleSource(frozen(m)), adamw(m.parameters())),
    "masters are trained": lambda m: (ModuleSource(m), MasterWeights(m).optimizer),
    "a copy is served": lambda m: (
        ServedSource(
            ModuleSource(frozen(m)), lambda name, shape: Fp8() if len(shape) > 1 else None
        ),
        adamw(m.parameters()),
    ),
}


@pytest.mark.promise(
    "What operators see",
    "`sync_after_step` refuses an optimizer that steps nothing of the source, and names what "
    "is stepped and not sent.",
)
@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS.keys())
def test_an_optimizer_that_steps_nothing_of_the_source_is_refused(
    make: Callable[[nn.Module], tuple[WeightSource, torch.optim.Optimizer]],
) -> None:
    source, optimizer = make(network())
    with fleet(source) as here, pytest.raises(ConfigError, match=r"none of the 6 param"):
        sync_after_step(optimizer, here.sender)
    assert not optimizer._optimizer_step_post_hooks


def test_a_wrapper_with_masters_is_followed_by_the_advice_of_both_errors() -> None:
    model, engine = network().bfloat16(), network().bfloat16()
    wrapper = MasterWeights(model)
    with fleet(model) as here:
        here.add(engine)
        here.wait(1)
        for wrong in (wrapper, Masters(wrapper), wrapper.optimizer):
            with pytest.raises(ConfigError, match=r"sender\.send_weights\(\) after"):
                sync_after_step(wrong, here.sender)  # type: ignore[arg-type]
        for step in range(3):
            train(model, step)
            wrapper.step()
            here.sender.send_weights(timeout_s=10)
            assert bits_equal(model, engine)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


DROPPED: dict[str, Callable[[nn.Module], tuple[WeightSource, SenderOptions]]] = {
    "leave_out": lambda m: (ModuleSource(m), SenderOptions(leave_out=("2.*",))),
    "rename": lambda m: (
        ModuleSource(m, rename=lambda n: None if n.startswith("2.") else n),
        SenderOptions(),
    ),
    "another module": lambda m: (ModuleSource(m.get_submodule("0")), SenderOptions()),
}


@pytest.mark.promise(
    "What operators see",
    "`sync_after_step` refuses an optimizer that steps nothing of the source, and names what "
    "is stepped and not sent.",
)
@pytest.mark.parametrize("make", DROPPED.values(), ids=DROPPED.keys())
def test_trained_tensors_that_are_not_sent_are_named(
    make: Callable[[nn.Module], tuple[WeightSource, SenderOptions]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network()
    source, options = make(model)
    with fleet(source, options=options) as here:
        sync_after_step(adamw(model.named_parameters()), here.sender)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "of the 6 parameters that the optimizer steps are not sent: " in said
    assert "2.weight" in said or "1.weight" in said


def test_parameters_without_names_are_told_by_their_place(caplog: pytest.LogCaptureFixture) -> None:
    model, head = network(), nn.Linear(8, 1)
    with fleet(model) as here:
        sync_after_step(adamw([*model.parameters(), *head.parameters()]), here.sender)
    assert "2 of the 8 parameters that the optimizer steps are not sent: " in caplog.text
    assert "'6 of group 0, of shape (1, 8)', '7 of" in caplog.text


def test_masters_of_some_parameters_are_named_with_the_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    masters = [p.detach().clone().requires_grad_() for p in matrices]
    with fleet(model.bfloat16()) as here:
        sync_after_step(adamw([*masters, model.get_parameter("1.weight")]), here.sender)
    assert "2 of the 3 parameters that the optimizer steps are not sent: " in caplog.text
    assert "if they are masters, call sender.send_weights() after" in caplog.text


class Rounded:
    """A source that computes what it sends."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor((n,), p.detach().half()) for n, p in self._module.named_parameters()]


def flat(model: nn.Module) -> Iterable[Any]:
    """Have the model's parameters be views of one buffer."""
    buffer = torch.cat([p.detach().view(-1) for p in model.parameters()])
    at = 0
    for parameter in model.parameters():
        parameter.data = buffer[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return model.parameters()


QUIET: dict[str, Callable[[nn.Module], tuple[WeightSource, Any]]] = {
    "plain": lambda m: (ModuleSource(m), adamw(m.parameters())),
    "fused": lambda m: (ModuleSource(m), adamw(m.parameters(), fused=True)),
    "some frozen": lambda m: (
        ModuleSource(m, rename=lambda n: n if n[0] == "2" else None),
        adamw([p.requires_grad_(n[0] == "2") for n, p in m.named_parameters()]),
    ),
    "flat buffer": lambda m: (ModuleSource(m), adamw(flat(m))),
    "split": lambda m: (
        ModuleSource(m, name_map=lambda n, shape: {f"{n}.0": (0,), f"{n}.1": (slice(1, None),)}),
        adamw(m.parameters()),
    ),
    "compiled": lambda m: (ModuleSource(torch.compile(m, backend="eager")), adamw(m.parameters())),  # type: ignore[arg-type]
    "served": lambda m: (
        ServedSource(ModuleSource(m), matrices),
        adamw(m.parameters()),
    ),
    "computed": lambda m: (Rounded(m), adamw(m.parameters())),
    "several": lambda m: (
        ModuleSource(m),
        [adamw(m.get_submodule("0").parameters()), adamw([*m.parameters()][2:])],
    ),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about its own compiler
@pytest.mark.parametrize("make", QUIET.values(), ids=QUIET.keys())
def test_what_reaches_the_source_or_cannot_be_judged_raises_no_alarm(
    make: Callable[[nn.Module], tuple[WeightSource, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    source, optimizer = make(network())
    with fleet(source) as here:
        sync_after_step(optimizer, here.sender)
    assert "not sent" not in caplog.text


def test_one_of_several_hooks_of_a_sender_needs_to_step_a_part_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network()
    with fleet(model) as here:
        for part in model.children():
            sync_after_step(adamw(part.parameters()), here.sender)
    assert "not sent" not in caplog.text


def engine_sync(source: WeightSource, folder: Path) -> EngineSync:
    return EngineSync(source, object(), shared_memory.Sender(folder / "socket"))  # type: ignore[arg-type]


def engine_fleet(source: WeightSource, folder: Path) -> EngineFleet:
    return EngineFleet(source, shared_memory.Sender(folder / "socket"))


@pytest.mark.parametrize("make", [engine_sync, engine_fleet])
def test_senders_to_running_engines_look_as_well(
    make: Callable[[WeightSource, Path], EngineSync | EngineFleet], tmp_path: Path
) -> None:
    model = network()
    with make(ModuleSource(model), tmp_path) as sender:
        sync_after_step(adamw(model.parameters()), sender)
        with pytest.raises(ConfigError, match="none of the 6"):
            sync_after_step(adamw(network().parameters()), sender)


def test_parameters_without_memory_are_not_judged() -> None:
    with fleet(network()) as here:
        for strange in (nn.LazyLinear(4), network().to("meta")):
            sync_after_step(adamw(strange.parameters()), here.sender)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_parameters_are_known_by_what_this_rank_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with fleet(model) as here:
        train(model)  # leaves the root gathered
        sync_after_step(adamw(model.parameters()), here.sender)
        assert "not sent" not in caplog.text
        with pytest.raises(ConfigError, match="none of the 6"):
            sync_after_step(adamw(network().parameters()), here.sender)


def test_each_rank_of_a_trainer_looks_at_its_own_part() -> None:
    parts = [ModuleSource(network()) for _ in range(2)]
    with contextlib.closing(SourcesOfRanks(parts)) as here:
        for sender, part in zip(here.ranks, parts, strict=True):
            sync_after_step(adamw(part.module.parameters()), sender).remove()
            with pytest.raises(ConfigError, match="none of the 6"):
                sync_after_step(adamw(network().parameters()), sender)
