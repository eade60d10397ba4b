"""Names: tied ones, those that an engine does not take, and what a user is told of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, NamedTensor, SenderOptions, WeightSource
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.transports import shared_memory
from tests.worlds.links import Model, random_model

CPU = torch.device("cpu")


class Engine(nn.Module):
    """Takes the embedding under one name, and a norm.

    Args:
        embedding: The name.
        others: What becomes of names that it does not know: "skipped", or "refused".
    """

    def __init__(self, embedding: str, others: str = "skipped") -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)
        self._names = {embedding: self.table, "norm": self.norm}
        self._others = others

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if self._others == "refused" and name not in self._names:
                raise KeyError(name)
            if name in self._names:
                self._names[name].data.copy_(tensor)


class Server:
    """An engine of one worker, by routes."""

    def __init__(self, engine: nn.Module, started_on: dict[str, Tensor]) -> None:
        self.engine, self.worker, self._started_on = engine, Worker(), started_on

    def connect(self, connection: dict[str, Any], /) -> None:
        self.worker.disconnect()
        to = TrainerInfo.model_validate(connection)
        try:
            target = self.worker.routed(
                self.engine, to, lambda: self._started_on.items(), self._proof
            )
            self.worker.connect(to, target, CPU, rank=0, world=1)
        except Exception as error:
            self.worker.decline(to, CPU, error)
            raise

    def _proof(self) -> Proof:
        return Proof(self.engine, Startup(lambda: deepcopy(self.engine)))

    def update(self, version: int, holder: str, /) -> None:
        self.worker.commit(version, holder)

    def name(self, version: int, holder: str, /) -> None: ...

    def disconnect(self, holder: str, /) -> None:
        self.worker.disconnect(holder)


@contextmanager
def syncing(
    source: nn.Module, server: Server, folder: Path, **options: Any
) -> Iterator[EngineSync]:
    link = shared_memory.Sender(folder / "socket")
    with EngineSync(ModuleSource(source), server, link, timeout_s=20, **options) as sync:
        yield sync
        server.worker.disconnect()


def tied(first: str, second: str) -> Model:
    """A model whose embedding is its head: under two names, in this order."""
    generator = torch.Generator().manual_seed(0)
    model = Model({first: torch.randn(6, 4, generator=generator)})
    model.register_parameter(second, model.get_parameter(first))
    model.register_parameter("norm", nn.Parameter(torch.ones(4), requires_grad=False))
    return model


@pytest.mark.parametrize("others", ["skipped", "refused"])
@pytest.mark.parametrize("names", [("head", "embed"), ("embed", "head")])
@pytest.mark.parametrize("saved", ["head", "embed"])
def test_an_engine_takes_a_tied_tensor_under_any_of_its_names(
    names: tuple[str, str], others: str, saved: str, tmp_path: Path
) -> None:
    source, engine = tied(*names), Engine("embed", others)
    started_on = {saved: torch.zeros(6, 4), "norm": torch.zeros(4)}
    with syncing(source, Server(engine, started_on), tmp_path) as sync:
        assert sync.send_weights().full_synced == 1
        assert torch.equal(engine.table, source.get_parameter("embed"))
        source.get_parameter("embed").data[3, 2] = 7
        assert sync.send_weights().kind == "delta"
        assert torch.equal(engine.table, source.get_parameter("embed"))


class Untied(Engine):
    """Has a head of its own."""

    def __init__(self) -> None:
        super().__init__("embed")
        self.own = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self._names["head"] = self.own


def test_an_engine_that_does_not_tie_what_the_trainer_ties_is_refused(tmp_path: Path) -> None:
    source = tied("head", "embed")
    started_on = {name: torch.zeros(6, 4) for name in ("head", "embed")} | {"norm": torch.zeros(4)}
    why = r"'head' is tied at the trainer \('head' and 'embed'\), .* as 'own' and 'table': start"
    with (
        syncing(source, Server(Untied(), started_on), tmp_path) as sync,
        pytest.raises((ConfigError, EngineFailed), match=why),
    ):
        sync.connect()


def with_names(**shapes: tuple[int, ...]) -> Model:
    return random_model(shapes, 0)


def refused(source: WeightSource, folder: Path, *, engine: Engine | None = None) -> str:
    """What is said when an engine, by default one of `embed` and `norm`, is let connect."""
    started_on = {"embed": torch.zeros(6, 4), "norm": torch.zeros(4)}
    link = shared_memory.Sender(folder / "socket")
    server = Server(engine or Engine("embed"), started_on)
    with EngineSync(source, server, link, timeout_s=20) as sync:
        with pytest.raises(ConfigError) as raised:
            sync.connect()
        server.worker.disconnect()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "`connect` names tensors that the engine does not take, or was started on and does not "
    "receive.",
)
def test_what_the_engine_does_not_take_is_said_when_it_connects(tmp_path: Path) -> None:
    source = with_names(embed=(6, 4), norm=(4,), mtp=(3,), bias=(2,))
    said = refused(ModuleSource(source), tmp_path)
    assert "takes nothing of 'mtp', 'bias'; if it has no use for that, leave it out" in said
    assert "SenderOptions(leave_out=['mtp'])" in said


def test_named_tensors_can_be_left_out(tmp_path: Path) -> None:
    source = with_names(embed=(6, 4), norm=(4,), mtp_a=(3,), mtp_b=(2,))
    engine = Engine("embed", "refused")
    started_on = {"embed": torch.zeros(6, 4), "norm": torch.zeros(4)}
    options = SenderOptions(leave_out=["mtp_*"])
    with syncing(source, Server(engine, started_on), tmp_path, options=options) as sync:
        assert sync.send_weights().full_synced == 1
        for weights in source.parameters():
            weights.data += 1
        stats = sync.send_weights()
        assert (stats.kind, sum(stats.parameters.values())) == ("delta", 2)
        assert torch.equal(engine.table, source.get_parameter("embed"))


def test_of_a_tied_tensor_the_names_are_left_out_alone(tmp_path: Path) -> None:
    source, engine = tied("head", "embed"), Engine("embed", "refused")
    started_on = {"embed": torch.zeros(6, 4), "norm": torch.zeros(4)}
    options = SenderOptions(leave_out=["head"])
    with syncing(source, Server(engine, started_on), tmp_path, options=options) as sync:
        assert sync.send_weights().full_synced == 1
        assert torch.equal(engine.table, source.get_parameter("embed"))


@pytest.mark.parametrize("wrap", ["compiled", "wrapped", "below another"])
def test_names_of_wrappers_are_said_with_what_to_rename(wrap: str, tmp_path: Path) -> None:
    inner = with_names(embed=(6, 4), norm=(4,))
    wrapper = nn.Module()
    name = {"compiled": "_orig_mod", "wrapped": "module", "below another": "model"}[wrap]
    wrapper.add_module(name, inner)
    said = refused(ModuleSource(wrapper), tmp_path)
    assert re.search(rf"a `rename=` from '{name}\.(\w+)' to '\1'", said), said
    (tmp_path / "renamed").mkdir()
    renamed = ModuleSource(wrapper, rename=lambda own: own.removeprefix(f"{name}."))
    started_on = {"embed": torch.zeros(6, 4), "norm": torch.zeros(4)}
    server = Server(Engine("embed"), started_on)
    with EngineSync(renamed, server, shared_memory.Sender(tmp_path / "renamed" / "socket")) as sync:
        assert sync.send_weights().receivers == 1
        server.worker.disconnect()


class _Named(WeightSource):
    """Tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = [NamedTensor((name,), tensor) for name, tensor in tensors.items()]

    def tensors(self) -> list[NamedTensor]:
        return self._tensors


class Choosy(Engine):
    """Refuses names that it does not know with a long text, as some engines do."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name not in self._names:
                raise ValueError(f"There is no parameter named {name!r}.\nThere are:\n  embed")
            super().load_weights([(name, tensor)])


class Twice(Engine):
    """Keeps some of its rows in two matrices."""

    def __init__(self) -> None:
        super().__init__("embed")
        self.more = nn.Parameter(torch.zeros(2, 4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "embed":
                self.more.data.copy_(tensor[4:])


RELOAD = "EngineSync(without_routes='reload')"


@pytest.mark.parametrize(
    ("engine", "names", "said"),
    [
        (
            Choosy("embed"),
            ("_orig_mod.embed", "_orig_mod.norm"),
            ("'_orig_mod.embed' to 'embed'", "leave_out=['_orig_mod.embed']"),
        ),
        (Choosy("embed"), ("embed", "norm", "mtp"), ("'mtp'", "leave_out=['mtp']")),
        (Twice(), ("embed", "norm"), ("'embed'", "twice, in 'table' and 'more'", RELOAD)),
        (
            Engine("table"),
            ("table", "norm"),
            ("no 'table'", "start the engine on a checkpoint that has it"),
        ),
        (Engine("model.embed"), ("model.embed", "norm"), ("'embed' is there", "a `rename=`")),
    ],
    ids=["torch.compile", "unknown", "twice", "not in the checkpoint", "another in the checkpoint"],
)
def test_an_engine_says_what_was_wrong_and_what_helps(
    engine: Engine, names: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    shapes = {"norm": (4,), "mtp": (3,)}
    tensors = {name: torch.ones(shapes.get(name.split(".")[-1], (6, 4))) for name in names}
    text = refused(_Named(tensors), tmp_path, engine=engine)
    assert all(part in text for part in said), text


def test_a_shape_of_another_model_is_said(tmp_path: Path) -> None:
    source = with_names(embed=(5, 4), norm=(4,))
    text = refused(ModuleSource(source), tmp_path)
    assert "'embed'" in text
