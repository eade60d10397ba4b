"""Trainers that follow one another at one engine, and declare other tensors than the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.transports import shared_memory
from tests.integrations import test_checkpoint_engine as stand_ins
from tests.integrations.test_checkpoint_engine import weights
from tests.worlds.links import Model


class Engine(nn.Module):
    """Keeps two tensors of a checkpoint under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(4, 4), requires_grad=False)
        self.second = nn.Parameter(torch.empty(4, 4), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            {"a": self.first, "b": self.second}[name].copy_(tensor)


class Server(stand_ins.Server):
    """With an engine that was started on numbers; `changes` its second tensor after loading."""

    def __init__(self, *, changes: bool = False) -> None:
        self.own = Engine()
        super().__init__(self.own)  # type: ignore[arg-type]
        self.own.load_weights(self.started_on())
        if changes:
            self.own.second.copy_(self.own.second.flip(0))

    def _proof(self) -> Proof:
        return Proof(self.own, Startup(Engine))

    def started_on(self) -> Iterator[tuple[str, Tensor]]:
        numbers = torch.arange(16.0).reshape(4, 4)
        yield from (("a", numbers), ("b", -numbers))


def rounded(seed: int, dtype: torch.dtype) -> Model:
    """Weights that bfloat16 holds."""
    return Model({n: p.data.bfloat16().to(dtype) for n, p in weights(seed).named_parameters()})


def alone(model: Model, name: str) -> Model:
    return Model({name: model.get_parameter(name).data})


def trainer(
    stack: ExitStack, source: Model, server: Server, folder: Path, *, keep: tuple[str, ...] = ()
) -> EngineSync:
    link = shared_memory.Sender(folder / "socket")
    return stack.enter_context(
        EngineSync(ModuleSource(source), server, link, paused=server.paused, keep=keep)
    )


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A trainer with other tensors can take over an engine that another trainer has written, "
    "or the error says what to do.",
)
@pytest.mark.parametrize("seed", [1, 2], ids=["its weights", "others"])
@pytest.mark.parametrize("what", ["other dtypes", "fewer tensors", "more tensors"])
def test_a_trainer_of_other_tensors_takes_over_an_engine_that_another_has_written(
    what: str, seed: int, tmp_path: Path
) -> None:
    first, second = rounded(1, torch.float32), rounded(seed, torch.float32)
    keep: list[tuple[str, ...]] = [(), ()]
    if what == "other dtypes":
        second = rounded(seed, torch.bfloat16)
    elif what == "fewer tensors":
        second, keep = alone(second, "a"), [(), ("b",)]
    else:
        first, keep = alone(first, "a"), [("b",), ()]
    server = Server()
    for turn in range(3):
        number = turn % 2
        source = (first, second)[number]
        with ExitStack() as stack:
            sync = trainer(stack, source, server, tmp_path, keep=keep[number])
            sync.send_weights()
            source.get_parameter("a").data[2, 3] += 1
            assert sync.send_weights().kind == "delta"
            server.worker.disconnect()
        assert not server.is_paused
        for name, held in (("a", server.own.first), ("b", server.own.second)):
            if hasattr(source, name):
                assert torch.equal(held, source.get_parameter(name).float())


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A trainer with other tensors can take over an engine that another trainer has written, "
    "or the error says what to do.",
)
def test_what_no_trainer_has_written_is_held_against_the_checkpoint_and_the_way_on_is_named(
    tmp_path: Path,
) -> None:
    server = Server(changes=True)
    for source, keep, text in (
        (weights(1), (), "'b' are not where the loader puts them: the engine changes its layout"),
        (alone(weights(1), "a"), ("b",), ""),
        (weights(1), (), "^1 tensors .* 'b' are not .* trainer has written .* restart the engine"),
        (weights(2), (), "^1 tensors .* 'b' are not .* trainer has written .* restart the engine"),
        (alone(weights(2), "a"), ("b",), ""),
    ):
        before = server.own.second.clone()
        with ExitStack() as stack:
            sync = trainer(stack, source, server, tmp_path, keep=keep)
            if text:
                with pytest.raises(ConfigError, match=text):
                    sync.send_weights()
            else:
                assert sync.send_weights().receivers == 1
            server.worker.disconnect()
        assert torch.equal(server.own.second, before)
        assert not server.is_paused
