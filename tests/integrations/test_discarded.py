"""Engines that sleep and keep no weights: what no sync writes must be there again as well."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import CheckpointTensor, ModuleSource, RoutedTarget
from deltasync.engines.proof.unwritten import Unwritten
from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.vllm import VllmServer
from deltasync.transports import shared_memory
from tests.integrations.test_vllm import Server
from tests.worlds.links import Model

_GARBAGE = 7


class Kernel:
    """What a layer computes with, which is no parameter: as grouped CUTLASS kernels have it."""

    scales: list[Tensor]

    def __init__(self) -> None:
        self.strides = torch.full((4,), 16, dtype=torch.int64)
        self.half = self.strides[:2]
        self.ones = torch.ones(1).expand(8)


class Engine(nn.Module):
    """Fuses two tensors, pads one, and holds what no checkpoint has."""

    scales: list[Tensor]
    twice: tuple[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(8, 16), requires_grad=False)
        self.padded = nn.Parameter(torch.full((5, 16), -1.0), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0))
        self.kernel = Kernel()
        self.cache = torch.zeros(2, 3)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = {"a": self.fused[:4], "b": self.fused[4:], "c": self.padded[:3]}
        for name, tensor in weights:
            places[name].copy_(tensor)
            if name == "c":
                self.padded[3:].fill_(-1)

    def tensors(self) -> dict[str, Tensor]:
        kernel = {f"kernel.{name}": tensor for name, tensor in vars(self.kernel).items()}
        return dict(self.named_parameters()) | dict(self.named_buffers()) | kernel

    def lose(self) -> None:
        """All memory that it was loaded into."""
        for tensor in (*self.tensors().values(), self.cache):
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            memory.fill_(_GARBAGE)


class Sleeper(Server):
    """A worker with such an engine."""

    def __init__(self) -> None:
        super().__init__(Model({}))
        self.engine = Engine()
        self.targets = weakref.WeakSet[RoutedTarget]()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        trainer = TrainerInfo.model_validate(init_info["trainer"])
        self.worker.disconnect()
        target = RoutedTarget(self.engine, trainer.checkpoint())
        self.targets.add(target)
        self.worker.connect(trainer, target, torch.device("cpu"), rank=0, world=1)

    def sleep(self) -> None:
        self.worker.discard(self.engine)
        self.engine.lose()


def trainer(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (4, 16), "b": (4, 16), "c": (3, 16)}
    return Model({n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()})


@contextmanager
def synced(source: Model, server: Sleeper, path: Path, sent: str = "abc") -> Any:
    link, part = shared_memory.Sender(path / "socket"), nn.Module()
    for name in sent:
        part.register_parameter(name, source.get_parameter(name))
    with EngineSync(ModuleSource(part), VllmServer(server), link, keep=["*"]) as sync:
        sync.send_weights()
        yield sync
        server.worker.disconnect()


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "After a sleep without a copy of the weights, what no sync writes is there again.",
)
def test_what_no_sync_writes_is_there_again(tmp_path: Path) -> None:
    source, server = trainer(0), Sleeper()
    with synced(source, server, tmp_path) as sync:
        for seed in (1, 2):
            before = {name: one.clone() for name, one in server.engine.tensors().items()}
            server.sleep()
            server.worker.wake()
            source.load_state_dict(trainer(seed).state_dict())
            assert sync.send_weights().full_synced == 1
            now = server.engine.tensors()
            for name in before.keys() - {"fused", "padded"}:
                assert torch.equal(now[name], before[name]), name
            assert torch.equal(now["padded"][3:], before["padded"][3:])
            assert torch.equal(now["padded"][:3], source.get_parameter("c"))
            assert torch.equal(now["fused"][:4], source.get_parameter("a"))


def test_a_second_sleep_copies_no_memory_that_is_gone(tmp_path: Path) -> None:
    source, server = trainer(0), Sleeper()
    with synced(source, server, tmp_path) as sync:
        server.sleep()
        server.sleep()
        server.worker.sleep()
        server.worker.wake()
        sync.send_weights()
        assert server.engine.kernel.strides.tolist() == [16] * 4


def test_weights_that_syncs_fill_are_not_copied() -> None:
    engine = Engine()
    target = RoutedTarget(engine, [CheckpointTensor(n, (4, 16), torch.float32) for n in "ab"])
    target.parameters()
    assert target.filled() == {"fused"}
    loaded = {one.untyped_storage().data_ptr() for one in (engine.kernel.strides, engine.fused)}
    kept = Unwritten(engine, target.filled(), loaded)
    engine.lose()
    kept.put_back()
    assert engine.kernel.strides.tolist() == [16] * 4
    assert not torch.equal(engine.fused, torch.zeros(8, 16))
    assert not torch.equal(engine.cache, torch.zeros(2, 3))  # it came after loading


def test_what_shares_a_storage_with_weights_is_kept() -> None:
    """So is what has no plain layout, or is reached at another place later."""
    engine, memory = Engine(), torch.arange(200.0)
    engine.fused.data = memory[:128].view(8, 16)
    engine.scales = [memory[128:].view(8, 9).T[::2]]
    engine.twice = (memory[150:151].expand(1 << 40),)
    engine.phase = torch.full((3,), 1 + 2j, dtype=torch.complex128)
    engine.meta = nn.Parameter(torch.empty(4, device="meta"))
    kept, held = Unwritten(engine, {"fused"}), engine.scales
    del engine.scales
    engine.kernel.scales = held
    memory.fill_(_GARBAGE)
    engine.phase.fill_(_GARBAGE)
    kept.put_back()
    assert torch.equal(memory, torch.arange(200.0))
    assert engine.phase.tolist() == [1 + 2j] * 3


def test_an_engine_that_sleeps_before_a_trainer_connects_is_as_it_was() -> None:
    """A proof of it would take what lies in its memory for what it was started with."""
    server = Sleeper()
    before = {name: one.clone() for name, one in server.engine.tensors().items()}
    server.sleep()
    server.worker.wake()
    for name, tensor in server.engine.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "After a sleep without a copy of the weights, what no sync writes is there again.",
)
@pytest.mark.parametrize(("first", "second"), [("abc", "ab"), ("abc", "c"), ("ab", "c")])
def test_a_trainer_of_other_tensors_cannot_bring_back_the_rest(
    first: str, second: str, tmp_path: Path
) -> None:
    source, server = trainer(0), Sleeper()
    with synced(source, server, tmp_path, first):
        server.sleep()
        server.worker.wake()
    with pytest.raises(ConfigError, match=r"given up in a sleep.* send its weights again first"):
        synced(source, server, tmp_path, second).__enter__()
    with synced(source, server, tmp_path, first):
        pass
    with synced(source, server, tmp_path, second):
        pass


def test_a_release_that_fails_leaves_the_engine_awake(tmp_path: Path) -> None:
    source, server = trainer(0), Sleeper()
    with synced(source, server, tmp_path) as sync:
        for model in (None, server.engine):
            with pytest.raises(ValueError, match="planted"), server.worker.released(model):
                raise ValueError("planted")
            server.worker.check_awake()
            source.get_parameter("a").data += 1
            assert sync.send_weights().receivers == 1
        server.worker.sleep()
        with pytest.raises(ValueError, match="planted"), server.worker.released(server.engine):
            raise ValueError("planted")
        with pytest.raises(ConfigError, match="the engine's weights sleep"):
            server.worker.check_awake()
        server.worker.wake()


def test_nothing_of_a_target_outlives_its_connection(tmp_path: Path) -> None:
    source, server = trainer(0), Sleeper()
    with synced(source, server, tmp_path):
        assert len(server.targets) == 1
    gc.collect()
    assert not server.targets
