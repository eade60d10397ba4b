"""The examples of trainers of several ranks, run as they are, and what the second of them says."""

from __future__ import annotations

from contextlib import closing
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worlds.programs import run_ranks
from tests.worlds.trainers import Trainer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize("name", ["fsdp", "own_sharding"])
def test_it_runs(name: str) -> None:
    done = run_ranks(EXAMPLES / f"{name}.py", 2)
    assert [rank.returncode for rank in done] == [0, 0], done
    first, *others = "".join(rank.stdout for rank in done).splitlines()
    assert first.startswith("v1: full")
    assert len(others) > 2
    for version, line in enumerate(others, start=2):
        assert line.startswith(f"v{version}: delta")


def example_of(name: str) -> Any:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fused_tensors_of_ranks_are_the_checkpoint_s() -> None:
    world = 4
    ours = example_of("own_sharding")
    layers = [ours.LocalLayer(world) for _ in range(world)]
    sources = [ours.LayerSource(layer, rank, world) for rank, layer in enumerate(layers)]
    target = ours.Layer()
    with closing(Trainer(sources)) as here:
        here.add(target)
        here.wait(1)
        for _ in range(3):
            for layer in layers:
                for name, parameter in layer.named_parameters():
                    if name != "norm":  # which all of them hold
                        parameter.data += torch.randn_like(parameter) * 1e-3
            here.send()
            for name, tensor in checkpoint_of(ours, layers).items():
                assert torch.equal(target.get_parameter(name).data, tensor.bfloat16()), name


def checkpoint_of(ours: Any, layers: list[Any]) -> dict[str, Tensor]:
    groups = torch.cat([layer.qkv.data for layer in layers])
    heads = groups.view(ours.GROUPS, ours.QUERIES + 2, ours.HEAD, ours.HIDDEN)
    halves = [layer.gate_up.data.chunk(2) for layer in layers]
    return {
        "q": heads[:, :-2].flatten(0, 2),
        "k": heads[:, -2].flatten(0, 1),
        "v": heads[:, -1].flatten(0, 1),
        "gate": torch.cat([gate for gate, _ in halves]),
        "up": torch.cat([up for _, up in halves]),
        "down": torch.cat([layer.down.data for layer in layers], dim=1),
        "norm": layers[0].norm.data,
    }
