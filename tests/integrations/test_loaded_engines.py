"""Engines that load checkpoints: what they take, what a proof finds, and who may write them.

Names that they do not take are said, also of wrappers and ties. Others load them, trainers of other
tensors follow, a proof may spoil them, and in a sleep they may lose what no sync writes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    NamedTensor,
    RoutedTarget,
    WeightSource,
)
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.errors import ConfigError, DirtyReceiver, EngineFailed, SyncAborted
from tests.worlds import toy_engines
from tests.worlds.fleets import Here, Routed, engine_of
from tests.worlds.links import Model, random_model

SHAPES = {"embed": (6, 4), "norm": (4,)}


class Engine(nn.Module):
    """Keeps tensors of a checkpoint as parameters of its own.

    Args:
        names: Of the checkpoint's tensors, and of its parameters for them.
        explains: Whether it raises why it does not take a name that it does not know.
    """

    def __init__(
        self,
        names: Mapping[str, str] = {"embed": "table", "norm": "norm"},
        *,
        explains: bool = False,
    ) -> None:
        super().__init__()
        for own in names.values():
            shape = SHAPES["norm" if own == "norm" else "embed"]
            self.register_parameter(own, nn.Parameter(torch.zeros(shape), requires_grad=False))
        self._names, self._explains = names, explains

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in self._names:
                self.get_parameter(self._names[name]).data.copy_(tensor)
            elif self._explains:
                raise ValueError(f"There is no parameter named {name!r}.\nThere are:\n  embed")


def zeros(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(SHAPES["norm" if name == "norm" else "embed"]) for name in names}


def server_of(engine: nn.Module, *names: str) -> Routed:
    """That was started on zeros, by these names."""
    return Routed(
        engine,
        zeros(*(names or SHAPES)),
        lambda: Proof(engine, Startup(lambda: deepcopy(engine))),
    )


def syncing(
    source: nn.Module, server: Routed, folder: Path, **options: Any
) -> AbstractContextManager[Here]:
    return engine_of(folder, source=source, server=server, **{"timeout_s": 20.0, **options})


def tied(first: str, second: str) -> Model:
    """A model whose embedding is its head: under two names, in this order."""
    model = Model({first: torch.randn(6, 4, generator=torch.Generator().manual_seed(0))})
    model.register_parameter(second, model.get_parameter(first))
    model.register_parameter("norm", nn.Parameter(torch.ones(4), requires_grad=False))
    return model


def test_an_engine_that_does_not_tie_what_the_trainer_ties_is_refused(tmp_path: Path) -> None:
    engine = Engine({"embed": "table", "norm": "norm", "head": "own"})
    why = r"'head' is tied at the trainer \('head' and 'embed'\), .* as 'own' and 'table': start"
    server = server_of(engine, "head", "embed", "norm")
    with (
        syncing(tied("head", "embed"), server, tmp_path) as here,
        pytest.raises((ConfigError, EngineFailed), match=why),
    ):
        here.sync.connect()


class Named(WeightSource):
    """Tensors by names that need not be names of attributes."""

    def __init__(self, names: Iterable[str]) -> None:
        self._tensors = [NamedTensor((name,), self._tensor(name)) for name in names]

    def _tensor(self, name: str) -> Tensor:
        own = name.rpartition(".")[2]
        return torch.ones({"norm": (4,), "mtp": (3,), "bias": (2,)}.get(own, (6, 4)))

    def tensors(self) -> list[NamedTensor]:
        return self._tensors


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "`connect` names tensors that the engine does not take, or was started on and does not "
    "receive.",
)
@pytest.mark.parametrize(
    ("engine", "names", "said"),
    [
        (
            Engine(),
            ("embed", "norm", "mtp", "bias"),
            (
                "takes nothing of 'mtp', 'bias'; if it has no use for that, leave it out",
                "SenderOptions(leave_out=['mtp'])",
            ),
        ),
        (
            Engine(explains=True),
            ("_orig_mod.embed", "_orig_mod.norm"),
            ("'_orig_mod.embed' to 'embed'", "leave_out=['_orig_mod.embed']"),
        ),
        (
            Engine({"table": "table", "norm": "norm"}),
            ("table", "norm"),
            ("no 'table'", "start the engine on a checkpoint that has it"),
        ),
    ],
    ids=["skipped", "compiled", "not there"],
)
def test_an_engine_says_what_was_wrong_and_what_helps(
    engine: Engine, names: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    with (
        engine_of(tmp_path, server=server_of(engine), of=lambda _: Named(names)) as here,
        pytest.raises(ConfigError) as raised,
    ):
        here.sync.connect()
    assert "\n" not in str(raised.value)
    assert all(part in str(raised.value) for part in said), raised.value


# Weights that others have loaded, or that a proof has spoiled


class Both(nn.Module):
    """Keeps two tensors of a checkpoint as one, upside down after loading if it shuffles."""

    def __init__(self, *, shuffles: bool = False) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.shuffles = shuffles

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            begin = {"a": 0, "b": 4}[name]
            self.both[begin : begin + 4].copy_(tensor)


def weights(seed: int) -> Model:
    return random_model({"a": (4, 4), "b": (4, 4)}, seed)


class Loaded(Routed):
    """An engine that others load."""

    def __init__(self, *, shuffles: bool = False) -> None:
        super().__init__(
            Both(shuffles=shuffles),
            {name: torch.zeros(4, 4) for name in "ab"},
            lambda: Proof(self.engine, Startup(Both)),
        )

    def bring(self, source: nn.Module) -> None:
        self.worker.reloaded()
        self.engine.load_weights([(name, one.data) for name, one in source.named_parameters()])
        if self.engine.shuffles:
            self.engine.both.copy_(self.engine.both.flip(0))


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine that may hold a mixture stays paused, and `close` logs it.",
)
@pytest.mark.parametrize("brought", ["others", "shuffled"])
def test_what_nothing_proves_is_not_written_until_others_have_loaded_the_trainers_weights(
    brought: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, server = weights(0), Loaded(shuffles=brought == "shuffled")
    with syncing(source, server, tmp_path) as here:
        server.worker.reloaded()
        server.bring(weights(1) if brought == "others" else source)
        before = server.engine.both.clone()
        for _ in range(2):
            with pytest.raises(SyncAborted, match="others have loaded this engine"):
                here.send()
            assert torch.equal(server.engine.both, before)
            was_asked = "update" in server.calls  # or its worker has refused before that
            assert (server.version, server.is_paused) == (0, was_asked)
        if brought == "others":
            here.sync.close()
            assert ["stays paused" in said for said in errors_in(caplog)] == [True] * was_asked
            assert server.is_paused == was_asked
            return
        server.engine.shuffles = False
        server.bring(source)
        assert here.send().full_synced == 0
        assert (server.version, server.is_paused) == (here.sync.sender.version, False)
        source.get_parameter("b").data[2, 3] = 7
        assert here.send().kind == "delta"
        assert server.engine.both[6, 3] == 7
        server.worker.reloaded()
        server.engine.both.zero_()  # which may be now: it is known where they lie
        assert here.send().full_synced == 1
        assert torch.equal(server.engine.both[4:], source.get_parameter("b"))
        here.sync.close()
        assert errors_in(caplog) == []


class Pair(Engine):
    """Keeps two tensors of a checkpoint under names of its own."""

    def __init__(self) -> None:
        super().__init__({})
        self._names = {"a": "first", "b": "second"}
        for own in self._names.values():
            self.register_parameter(own, nn.Parameter(torch.empty(4, 4), requires_grad=False))


def pair() -> Routed:
    """An engine that was started on numbers."""
    numbers = torch.arange(16.0).reshape(4, 4)
    engine: Any = Pair()
    started_on = {"a": numbers, "b": -numbers}
    engine.load_weights(started_on.items())
    return Routed(engine, started_on)


def rounded(seed: int, dtype: torch.dtype = torch.float32) -> Model:
    """Weights that bfloat16 holds."""
    return Model({n: p.data.bfloat16().to(dtype) for n, p in weights(seed).named_parameters()})


def alone(model: Model, name: str) -> Model:
    return Model({name: model.get_parameter(name).data})


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
    sources = [rounded(1), rounded(seed)]
    if what == "other dtypes":
        sources[1] = rounded(seed, torch.bfloat16)
    else:
        fewer = what == "fewer tensors"
        sources[fewer] = alone(sources[fewer], "a")
    server = pair()
    for source in (*sources, sources[0]):
        keep = () if hasattr(source, "b") else ("b",)
        with syncing(source, server, tmp_path, keep=keep) as here:
            here.send()
            source.get_parameter("a").data[2, 3] += 1
            assert here.send().kind == "delta"
        assert not server.is_paused
        for name, held in (("a", server.engine.first), ("b", server.engine.second)):
            if hasattr(source, name):
                assert torch.equal(held, source.get_parameter(name).float())


class Spoiled(toy_engines.Engine):
    made = toy_engines.InSet


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A proof puts everything back, whatever is raised. If it cannot, the worker refuses every "
    "request.",
)
def test_an_engine_that_a_proof_has_spoiled_takes_no_order_until_it_is_restarted(
    tmp_path: Path,
) -> None:
    started_on, wanted = toy_engines.checkpoint(), toy_engines.checkpoint(1)

    def start(kind: type[toy_engines.Engine]) -> None:
        server.engine = kind.started(started_on)
        server.proof = lambda: Proof(server.engine, Startup(kind, work_on=toy_engines.work_on))
        server.start()

    server = Routed(nn.Module(), started_on)
    source = toy_engines.Engine()
    source.load_weights(wanted.items())
    start(Spoiled)
    text = "the engine's weights could not be put back"
    with syncing(source, server, tmp_path) as here:
        for call in (here.sync.connect, here.send, here.sync.connect):
            with pytest.raises(DirtyReceiver, match=text):
                call()
            assert server.is_paused  # it must not generate with what it holds
        server.worker.reloaded()  # what it has made of its weights is not known to be made again
        with pytest.raises(DirtyReceiver, match=text):
            here.send()
        with pytest.raises(DirtyReceiver, match=text):
            server.commit(1, "")
        start(toy_engines.Engine)
        server.is_paused = True
        assert here.send().full_synced == 1
        assert not server.is_paused
    for name, tensor in wanted.items():
        assert torch.equal(server.engine.get_parameter(name), tensor)


# Sleeps without a copy of the weights

GARBAGE = 7


class Kernel:
    """What a layer computes with, which is no parameter: as grouped CUTLASS kernels have it."""

    def __init__(self, memory: Tensor) -> None:
        self.strides = torch.full((4,), 16, dtype=torch.int64)
        self.scales = memory.view(8, 9).T[::2]


class Fused(nn.Module):
    """Fuses two tensors, pads one, and holds what no checkpoint has, in the same memory too."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(200.0)
        self.fused = nn.Parameter(memory[:128].view(8, 16), requires_grad=False)
        self.padded = nn.Parameter(torch.full((5, 16), -1.0), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0))
        self.kernel = Kernel(memory[128:])
        self.meta = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = {"a": self.fused[:4], "b": self.fused[4:], "c": self.padded[:3]}
        for name, tensor in weights:
            places[name].copy_(tensor)
            if name == "c":
                self.padded[3:].fill_(-1)

    def tensors(self) -> dict[str, Tensor]:
        kernel = {f"kernel.{name}": tensor for name, tensor in vars(self.kernel).items()}
        found = dict(self.named_parameters()) | dict(self.named_buffers()) | kernel
        return {name: tensor for name, tensor in found.items() if not tensor.is_meta}

    def lose(self) -> None:
        """All memory that it was loaded into."""
        for tensor in self.tensors().values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(GARBAGE)


class Sleeper(Routed):
    """An engine whose memory is given up in a sleep."""

    def __init__(self) -> None:
        super().__init__(Fused(), {})
        self.targets = weakref.WeakSet[RoutedTarget]()

    def let_connect(self, worker: Any, to: Any, rank: int) -> None:
        target = RoutedTarget(self.engine, to.checkpoint())
        self.targets.add(target)
        worker.connect(to, target, torch.device("cpu"), rank=0, world=1)

    def sleep(self) -> None:
        self.worker.discard(self.engine)
        self.engine.lose()


def part(seed: int, names: str = "abc") -> Model:
    whole = random_model({"a": (4, 16), "b": (4, 16), "c": (3, 16)}, seed)
    return Model({name: whole.get_parameter(name).data for name in names})


@contextmanager
def synced(source: Model, server: Sleeper, path: Path) -> Iterator[Here]:
    with syncing(source, server, path, keep=["*"]) as here:
        here.send()
        yield here


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "After a sleep without a copy of the weights, what no sync writes is there again.",
)
def test_what_no_sync_writes_is_there_again(tmp_path: Path) -> None:
    source, server = part(0), Sleeper()
    with synced(source, server, tmp_path) as here:
        for seed in (1, 2):
            before = {name: one.clone() for name, one in server.engine.tensors().items()}
            for _ in range(seed):  # a second sleep copies no memory that is gone
                server.sleep()
            server.worker.sleep()
            server.worker.wake()
            source.load_state_dict(part(seed).state_dict())
            assert here.send().full_synced == 1
            now = server.engine.tensors()
            for name in before.keys() - {"fused", "padded"}:
                assert torch.equal(now[name], before[name]), name
            assert torch.equal(now["padded"][3:], before["padded"][3:])
            assert torch.equal(now["padded"][:3], source.get_parameter("c"))
            assert torch.equal(now["fused"][:4], source.get_parameter("a"))
        gc.collect()
        assert len(server.targets) == 1
    del here, now, before
    gc.collect()
    assert not server.targets  # nothing of a target outlives its connection


def test_an_engine_that_sleeps_before_a_trainer_connects_is_as_it_was() -> None:
    """A proof of it would take what lies in its memory for what it was started with."""
    server = Sleeper()
    before = {name: one.clone() for name, one in server.engine.tensors().items()}
    server.sleep()
    server.worker.wake()
    for name, tensor in server.engine.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(("first", "second"), [("abc", "ab"), ("abc", "c"), ("ab", "c")])
def test_a_trainer_of_other_tensors_cannot_bring_back_the_rest(
    first: str, second: str, tmp_path: Path
) -> None:
    server = Sleeper()
    with synced(part(0, first), server, tmp_path):
        server.sleep()
        server.worker.wake()
    with pytest.raises(ConfigError, match=r"given up in a sleep.* send its weights again first"):
        synced(part(0, second), server, tmp_path).__enter__()
    for names in (first, second):
        with synced(part(0, names), server, tmp_path):
            pass
