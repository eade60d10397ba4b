"""What ZeRO-3 and FSDP1 leave of a parameter on a rank is never taken for the parameter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import (
    DeltaSyncError,
    ModuleSource,
    ModuleTarget,
    NamedTensor,
    StoreSender,
    WeightSource,
)
from deltasync.errors import ConfigError
from deltasync.integrations.streamed import StreamedWeights
from deltasync.quant.served import ServedSource
from tests.worlds.links import fleet
from tests.worlds.ranks import free_port, run_ranks
from tests.worlds.trainers import matrices


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 6))


def partitioned(model: nn.Module) -> nn.Module:
    """As DeepSpeed's ZeRO-3 leaves a model outside of forward passes; one tensor is persistent."""
    for name, parameter in model.named_parameters():
        zero: Any = parameter
        zero.ds_shape, zero.ds_numel, zero.ds_id = parameter.shape, parameter.numel(), id(parameter)
        zero.ds_tensor = parameter.detach().clone()
        if name != "0.bias":
            parameter.data = torch.empty(0, dtype=parameter.dtype)
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """As `deepspeed.zero.GatheredParameters`."""
    parameters: Any = list(model.parameters())
    for parameter in parameters:
        parameter.data = parameter.ds_tensor.clone()
    yield
    for parameter in parameters:
        parameter.data = torch.empty(0, dtype=parameter.dtype)


class Own:
    """A source of a user's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor((name,), tensor) for name, tensor in self._module.named_parameters()]


SOURCES: dict[str, Callable[[nn.Module], WeightSource]] = {
    "module": ModuleSource,
    "own": Own,
    "served": lambda m: ServedSource(ModuleSource(m), matrices),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_placeholders_of_zero_3_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Until they are gathered, and again afterwards; an engine of them is refused, too."""
    model = partitioned(net())
    source, words = SOURCES[kind](model), r"^0\.weight: .*GatheredParameters"
    sender = StoreSender(source, tmp_path)
    with pytest.raises(ConfigError, match=words):
        sender.publish()
    with pytest.raises(ConfigError, match=words):
        StreamedWeights().take(model.named_parameters())
    with fleet(source) as here:
        serving = here.add(net())
        here.wait(1)
        for _ in range(2):  # and the engine is not blamed
            with pytest.raises(ConfigError, match=words):
                here.sender.send_weights(timeout_s=60)
        assert not serving.errors
    with gathered(model):
        assert sender.publish().numel >= 66
    with pytest.raises(DeltaSyncError, match=r"0\.weight"):
        sender.publish()
    with pytest.raises(ConfigError, match=r"0\.weight: .*is held here"):
        ModuleTarget(model).parameters()


def test_copies_of_placeholders_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A `state_dict` does not say what ZeRO-3 has partitioned; some tensors may well be empty."""
    weights = StreamedWeights()
    weights.take(partitioned(net()).state_dict().items())
    StoreSender(weights, tmp_path).publish()
    (said,) = [r.getMessage() for r in caplog.records if "ZeRO-3" in r.getMessage()]
    assert said.startswith("'0.weight', '1.weight', '1.bias' have no elements, and are sent so: ")


def test_a_model_without_elements_is_an_error(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.empty(0)))
    with pytest.raises(ConfigError, match="no weights came"):
        StoreSender(ModuleSource(model), tmp_path).publish()
    with fleet(model) as here:
        here.add(net())
        here.wait(1)
        with pytest.raises(ConfigError, match="no weights came"):
            here.sender.send_weights(timeout_s=60)


def test_ranks_that_torch_shards_publish_nothing_alone(tmp_path: Path) -> None:
    run_ranks(publish, 2, 2, free_port(), tmp_path, timeout_s=150)


def publish(rank: int, world: int, port: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    for keeps in (False, True):
        model = FullyShardedDataParallel(
            net(), use_orig_params=keeps, device_id=torch.device("cpu")
        )
        sender = StoreSender(ModuleSource(model, rename=short), folder / f"{rank}-{keeps}")
        inner = StoreSender(ModuleSource(model.module), folder / "inner")  # without an FSDP module
        for refused in (sender, inner):
            with pytest.raises(ConfigError, match=r"(_flat_param|0\.weight): .*summon_full"):
                refused.publish()
        with pytest.raises(ConfigError, match=r"0\.weight: "):
            ModuleTarget(model).parameters()
        with torch.no_grad():
            model(torch.ones(2, 8))  # which leaves it gathered, out of reach
        with pytest.raises(ConfigError, match=r"(_flat_param|0\.weight): .*summon_full"):
            sender.publish()
        with FullyShardedDataParallel.summon_full_params(model):
            assert sender.publish().numel == 66
    sharded: Any = fully_shard(net())
    with pytest.raises(ConfigError, match=r"of '0\.weight': .*for a store, gather it"):
        StoreSender(ModuleSource(sharded), folder / f"{rank}-2").publish()
    dist.barrier()
    os._exit(0)


def short(name: str) -> str:
    return name.removeprefix("_fsdp_wrapped_module.")
