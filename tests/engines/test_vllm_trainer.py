"""The trainer's half of vLLM's interface: vLLM's own factory and sources, and workers of ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

from deltasync import ModuleTarget
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    SourceChanged,
)
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.vllm_trainer import DeltaSyncTrainer, DeltaSyncTrainerInitInfo
from deltasync.integrations.worker import Worker
from tests.worlds.links import Model, random_model

SHAPES = {"a": (40, 16), "b": (7,), "c": (300,)}

pytestmark = pytest.mark.timeout(120)


class Fleet:
    """Engines of one worker each, and vLLM's four calls, which reach all at the same time."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules, self.workers = modules, [Worker() for _ in modules]
        self.calls, self.version = list[str](), "default"
        self.fails_to_update = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        trainer = TrainerInfo.model_validate(init_info["trainer"])
        for number, (worker, module) in enumerate(zip(self.workers, self.modules, strict=True)):
            worker.disconnect()
            target, cpu = ModuleTarget(module), torch.device("cpu")
            worker.connect(trainer, target, cpu, rank=0, world=1, replica=str(number))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        if self.fails_to_update:
            raise ConnectionError("planted")
        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(lambda worker: worker.commit(**update_info), self.workers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self.version = weight_version or self.version

    def hold(self, weights: nn.Module) -> bool:
        trained = dict(weights.named_parameters())
        return all(
            torch.equal(held, trained[name].to(held.dtype))
            for module in self.modules
            for name, held in module.named_parameters()
        )


def engine_of() -> Model:
    return Model({name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()})


def info(rank: int = 0, caches: Any = "keep", **settings: Any) -> DeltaSyncTrainerInitInfo:
    settings = {"workers": 1, "timeout_s": 20.0} | settings
    return DeltaSyncTrainerInitInfo("shared_memory", caches=caches, settings=settings, rank=rank)


@contextmanager
def trainer(source: Any, fleet: Fleet, **settings: Any) -> Iterator[DeltaSyncTrainer]:
    settings = {"workers": len(fleet.workers)} | settings
    engine = WeightTransferTrainerFactory.trainer_init(
        info(**settings), client=fleet, source=source
    )
    assert isinstance(engine, DeltaSyncTrainer)
    with closing(SimpleNamespace(close=engine.shutdown)):
        yield engine
    for worker in fleet.workers:
        worker.disconnect()


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Loops that drive vLLM's own trainer interface get the same: engines hold the trainer's "
    "bits after each `send_weights`, which raises if one does not, and the next call covers "
    "that.",
)
def test_engines_follow_by_deltas_and_the_next_sync_covers_one_that_fails() -> None:
    model, fleet = random_model(SHAPES, 0), Fleet(engine_of(), engine_of())
    with trainer(ModuleSource(model), fleet, timeout_s=2.0) as engine:
        assert fleet.calls == ["init"]
        for version in range(1, 5):
            engine.send_weights()
            assert fleet.hold(model)
            assert fleet.version == str(version)
            stats = engine.last_stats
            assert stats is not None
            assert (stats.version, stats.receivers) == (version, 2)
            assert version == 1 or (stats.kind == "delta" and 0 < stats.nnz < 100)
            model.get_parameter("a").data.view(-1)[version::17] *= 3
        assert not fleet.hold(model)  # the last step was not sent
        fleet.fails_to_update = True
        with pytest.raises(DeltaSyncError):
            engine.send_weights()
        fleet.fails_to_update = False
        model.get_parameter("c").data[5] = 8
        engine.send_weights()
        assert fleet.hold(model)


class Scripted(WeightSource):
    """Says one thing and brings another."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights, self.seen = weights, 0
        self.metas = [ParamMeta(n, one.dtype, tuple(one.shape)) for n, one in weights.items()]

    def metadata(self) -> list[ParamMeta]:
        return self.metas

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            self.seen += 1
            yield name, tensor.clone()


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A source of vLLM's that brings something else than it declares is refused by name, and "
    "ranks that gather are not left waiting.",
)
@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"b": torch.ones(7), "a": torch.ones(40, 16), "c": torch.ones(300)}, "announced"),
        ({"a": torch.ones(40, 16), "b": torch.ones(7).half(), "c": torch.ones(300)}, "float16"),
        ({"a": torch.ones(40, 16)}, "nothing came"),
        ({"a": torch.ones(16, 40), "b": torch.ones(7), "c": torch.ones(300)}, "16, 40"),
    ],
)
def test_a_source_that_brings_something_else_is_refused_and_gone_through(
    other: dict[str, Tensor], problem: str
) -> None:
    model, fleet = random_model(SHAPES, 0), Fleet(engine_of())
    right = {name: tensor.data for name, tensor in model.named_parameters()}
    source = Scripted(right)
    with trainer(source, fleet) as engine:
        source.weights = other
        with pytest.raises(SourceChanged, match=problem):
            engine.send_weights()
        assert source.seen == len(other)  # other ranks may gather the rest
        assert fleet.calls == ["init"]
        source.weights = right
        engine.send_weights()
        assert fleet.hold(model)


def test_another_rank_only_goes_through_the_source() -> None:
    fleet = Fleet(engine_of())
    source = Scripted({"a": torch.ones(3), "b": torch.ones(2)})
    other = WeightTransferTrainerFactory.trainer_init(info(rank=1), client=fleet, source=source)
    other.send_weights()
    assert (other.rank, other.is_sender, source.seen) == (1, False, 2)
    other.shutdown()
    assert fleet.calls == []


class Local(Scripted):
    """Like a source from vLLM 0.33 on."""

    @property
    def metadata(self) -> Any:
        return [SimpleNamespace(**vars(meta), owners=(0, 1)) for meta in self.metas]

    def implements_iter_full(self) -> bool:
        return True

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


def test_a_source_as_from_vllm_0_33_on_is_followed() -> None:
    source, held = Local({"w": torch.ones(3)}), Model({"w": torch.zeros(3)})
    with trainer(source, Fleet(held)) as engine:
        for value in (1.0, 2.0):
            source.weights["w"].fill_(value)
            engine.send_weights()
            assert held.get_parameter("w").tolist() == [value] * 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"source": None}, "is no WeightSource"),
        ({"source": Scripted({"w": torch.empty(3, dtype=torch.bits8)})}, "cannot be sent"),
        ({"init_info": info(caches="clear")}, "Fleet has no clear_cache.*caches=.keep"),
        (
            {"init_info": DeltaSyncTrainerInitInfo("shared_memory", caches="keep", rank=0)},
            "Fleet cannot tell how many workers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_asked(
    arguments: dict[str, Any], problem: str
) -> None:
    fleet = Fleet(engine_of())
    given = {"init_info": info(), "source": ModuleSource(random_model(SHAPES, 0))} | arguments
    with pytest.raises(ConfigError, match=problem):
        WeightTransferTrainerFactory.trainer_init(client=fleet, **given)
    assert fleet.calls == []


def test_two_calls_at_once_do_not_mix() -> None:
    model, fleet = random_model(SHAPES, 0), Fleet(engine_of())
    entered, leave = threading.Event(), threading.Event()

    class Slow(Scripted):
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            entered.set()
            assert leave.wait(20)
            yield from super().__iter__()

    source = Slow({name: tensor.data for name, tensor in model.named_parameters()})
    with trainer(source, fleet) as engine, ThreadPoolExecutor(1) as thread:
        first = thread.submit(engine.send_weights)
        assert entered.wait(20)
        with pytest.raises(ConfigError, match="used by one thread"):
            engine.send_weights()
        leave.set()
        first.result()
        assert fleet.hold(model)
