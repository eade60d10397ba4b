"""Optimizers whose steps do not reach what is sent: refused or named when the hook is made."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from deltasync import ModuleSource, SenderOptions, WeightSource, sync_after_step
from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from deltasync.quant.served import ServedSource
from deltasync.transports import shared_memory
from tests.worlds.links import bits_equal, fleet
from tests.worlds.trainers import Rounded, matrices
from tests.worlds.trainers import Trainer as SourcesOfRanks

NONE_SENT = r"none of the 6 param.* masters .* call sender\.send_weights\(\) after that instead"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, **settings)


def train(module: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    module(torch.randn(4, 8, dtype=dtype)).float().square().sum().backward()


def plain(model: nn.Module) -> Any:
    return adamw(model.parameters())


def frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


@pytest.mark.promise(
    "What operators see",
    "`sync_after_step` refuses an optimizer that steps nothing of the source, and names what "
    "is stepped and not sent.",
)
@pytest.mark.parametrize(
    ("source_of", "optimizer_of"),
    [
        (ModuleSource, lambda m: adamw(copy.deepcopy(m).parameters())),  # a copy is trained
        (ModuleSource, lambda m: adamw(p.detach().clone() for p in m.parameters())),
        (lambda m: ModuleSource(frozen(m)), plain),
        (lambda m: ServedSource(ModuleSource(frozen(m)), matrices), plain),
    ],
)
def test_an_optimizer_that_steps_nothing_of_the_source_is_refused(
    source_of: Callable[[nn.Module], WeightSource], optimizer_of: Callable[[nn.Module], Any]
) -> None:
    model = network()
    optimizer = optimizer_of(model)
    with fleet(source_of(model)) as here, pytest.raises(ConfigError, match=NONE_SENT):
        sync_after_step(optimizer, here.sender)
    assert not optimizer._optimizer_step_post_hooks


def masters_of_matrices(model: nn.Module) -> list[Any]:
    masters = [p.detach().clone().requires_grad_() for p in model.parameters() if p.dim() > 1]
    model.bfloat16()
    return [*masters, model.get_parameter("1.weight")]


def by_name(model: nn.Module) -> Any:
    return adamw(model.named_parameters())


def in_one_buffer(model: nn.Module) -> Any:
    """As Megatron keeps parameters."""
    held = list(model.parameters())
    vector_to_parameters(parameters_to_vector(held).detach(), held)
    return by_name(model)


OF_6, OF_3 = (f" of the {n} parameters that the optimizer steps are not" for n in (6, 3))
HOOKS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any], tuple[str, ...]]] = {
    # What is stepped and not sent is named.
    "leave_out": (by_name, ModuleSource, (OF_6, "2.weight")),
    "leave_out of one buffer": (in_one_buffer, ModuleSource, (OF_6, "2.weight")),
    "rename": (
        by_name,
        lambda m: ModuleSource(m, rename=lambda name: None if name[0] == "2" else name),
        (OF_6, "2.weight"),
    ),
    "part of a model": (by_name, lambda m: ModuleSource(m[:2]), (OF_6, "2.weight")),
    "masters of some": (
        lambda m: adamw(masters_of_matrices(m)),
        ModuleSource,
        ("2" + OF_3, "if they are masters, call sender.send_weights() after"),
    ),
    "masters of some, as Megatron's": (
        lambda m: adamw([one.detach() for one in masters_of_matrices(m)]),
        ModuleSource,
        ("2" + OF_3, "if they are masters, call sender.send_weights() after"),
    ),
    # What reaches the source or cannot be judged raises no alarm.
    "frozen elsewhere": (
        lambda m: adamw([*m.parameters(), *frozen(network()).parameters()]),
        ModuleSource,
        (),
    ),
    "plain": (plain, ModuleSource, ()),
    "served": (plain, lambda m: ServedSource(ModuleSource(m), matrices), ()),
    "computed": (plain, Rounded, ()),
}


@pytest.mark.promise(
    "What operators see",
    "`sync_after_step` refuses an optimizer that steps nothing of the source, and names what "
    "is stepped and not sent.",
)
@pytest.mark.parametrize("name", HOOKS)
def test_what_is_stepped_and_not_sent_is_named_and_nothing_else(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, (optimizer_of, source_of, said) = network(), HOOKS[name]
    options = SenderOptions(leave_out=("2.*",) if name.startswith("leave_out") else ())
    optimizer = optimizer_of(model)
    with fleet(source_of(model), options=options) as here:
        sync_after_step(optimizer, here.sender)
    assert all(words in caplog.text for words in said)
    assert ("not sent" in caplog.text) == bool(said)


class MasterWeights:
    """Copies float32 masters into a model after its optimizer's step; it is none of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.model]
        self.inner = adamw(self.masters)

    def step(self) -> None:
        for master, own in zip(self.masters, self.model, strict=True):
            assert own.grad is not None
            master.grad = own.grad.float()
        self.inner.step()
        for master, own in zip(self.masters, self.model, strict=True):
            own.data.copy_(master)


def test_a_wrapper_with_masters_is_followed_by_the_advice_of_both_errors() -> None:
    model, engine = network().bfloat16(), network().bfloat16()
    wrapper: Any = MasterWeights(model)
    with fleet(model) as here:
        here.join(engine)
        for wrong in (wrapper, wrapper.inner):
            with pytest.raises(ConfigError, match=r"sender\.send_weights\(\) after"):
                sync_after_step(wrong, here.sender)
        for seed in range(3):
            train(model, seed)
            wrapper.step()
            here.sender.send_weights(timeout_s=60)
            assert bits_equal(model, engine)


def test_senders_of_all_kinds_look(tmp_path: Path) -> None:
    """To running engines as well, and from each rank of a trainer, of what that rank holds."""
    parts = [ModuleSource(network()) for _ in range(2)]
    link, other = (shared_memory.Sender(tmp_path / name) for name in ("link", "other"))
    with (
        contextlib.closing(SourcesOfRanks(parts)) as here,
        EngineSync(parts[0], object(), link) as engine,  # type: ignore[arg-type]
        EngineFleet(parts[0], other) as many,
    ):
        senders: list[Any] = [*here.ranks, engine, many]
        for sender, part in zip(senders, [*parts, *parts[:1] * 2], strict=True):
            sync_after_step(adamw(part.module.parameters()), sender).remove()
            with pytest.raises(ConfigError, match=NONE_SENT):
                sync_after_step(adamw(network().parameters()), sender)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_what_fsdp_has_gathered_around_a_source_is_not_sent_in_place_of_what_is_stepped() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, engine = nn.Sequential(network(), nn.Linear(8, 8)), network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = plain(model)
    with fleet(model[0]) as here:
        here.join(engine)
        here.sender.send_weights(timeout_s=60)
        train(model)
        with torch.no_grad():
            model(torch.randn(4, 8))
        optimizer.step()
        here.sender.send_weights(timeout_s=60)
    model.reshard()  # type: ignore[operator]
    stepped: Any = model[0].parameters()
    assert all(
        torch.equal(one.full_tensor(), held)
        for one, held in zip(stepped, engine.parameters(), strict=True)
    )


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
        with pytest.raises(ConfigError, match=NONE_SENT):
            sync_after_step(adamw(network().parameters()), here.sender)
