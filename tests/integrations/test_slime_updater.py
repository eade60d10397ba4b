"""The recipe for slime, which is not installed here: what it has of slime is in slime's shape."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltasync.transports import shared_memory
from tests.worlds.fleets import SHAPES, Server, model
from tests.worlds.ranks import free_port, run_ranks

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "slime_updater.py"
ITERATOR = "slime.backends.megatron_utils.update_weight.hf_weight_iterator_base"
ACTOR = "slime.backends.megatron_utils.actor"


class HfWeightIteratorBase:
    """Ranks own tensors in turn; all of them get each, as a chunk of one."""

    @staticmethod
    def create(args: Any, _model: Any, **how: Any) -> HfWeightIteratorBase:
        assert sorted(how) == ["model_name", "quantization_config"]
        return HfWeightIteratorBase()

    def get_hf_weight_chunks(
        self, local_weights: dict[str, Tensor]
    ) -> Iterator[list[tuple[str, Tensor]]]:
        for number, (name, tensor) in enumerate(local_weights.items()):
            owner = number % dist.get_world_size()
            gathered = tensor.clone() if dist.get_rank() == owner else torch.empty_like(tensor)
            dist.broadcast(gathered, src=owner)
            yield [(name, gathered)]


def slime_in_place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of slime that the recipe looks into, and the updater's class that it leaves there."""
    for name in (ITERATOR, ACTOR):
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            module = ".".join(parts[:count])
            if module not in sys.modules:
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for count in range(1, len(parts)):
            parent = sys.modules[".".join(parts[:count])]
            setattr(parent, parts[count], sys.modules[".".join(parts[: count + 1])])
    sys.modules[ITERATOR].HfWeightIteratorBase = HfWeightIteratorBase  # type: ignore[attr-defined]
    spec = spec_from_file_location("slime_updater", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    recipe = module_from_spec(spec)
    spec.loader.exec_module(recipe)
    recipe.use(None)
    return sys.modules[ACTOR].UpdateWeightFromDistributed


class ToyServer:
    """Takes the place of an SglangServer, which says how many workers it has."""

    workers = 1

    def __init__(self) -> None:
        self._server = Server(model(9))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def holds(self, weights: dict[str, Tensor]) -> bool:
        held = dict(self.module.named_parameters())
        return all(torch.equal(held[name], tensor) for name, tensor in weights.items())


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "The recipe for slime: ranks gather together, and servers that come and go hold each version.",
)
def test_servers_hold_what_ranks_have_gathered(tmp_path: Path) -> None:
    run_ranks(rank_of_slime, 2, tmp_path, free_port(), timeout_s=100)


def rank_of_slime(rank: int, folder: Path, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    weights = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    servers = {url: ToyServer() for url in ("first", "second", "third")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        updater = made(slime_in_place(monkeypatch), servers, weights, folder)
        for number, engines in enumerate([["first", "second"], None, ["second", "third"], None]):
            if engines is not None:
                updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1, 1])
            updater.update_weights()
            assert updater.weight_version == number + 1
            follow = ("first", "second") if number < 2 else ("second", "third")
            for url in follow if rank == 0 else ():
                assert servers[url].holds(weights)
                assert servers[url].version == number + 1
            for tensor in weights.values():
                tensor.view(-1)[number::5] *= -2
    dist.destroy_process_group()


def made(
    updater: Any, servers: dict[str, ToyServer], weights: dict[str, Tensor], folder: Path
) -> Any:
    class Updater(updater):  # type: ignore[misc]
        @staticmethod
        def address_of(engine: str) -> str:
            return engine

        @staticmethod
        def server_of(address: str) -> ToyServer:
            return servers[address]

        @staticmethod
        def transport() -> shared_memory.Sender:
            return shared_memory.Sender(folder / "socket")

    return Updater(None, None, lambda: weights, model_name="llama", quantization_config=None)
