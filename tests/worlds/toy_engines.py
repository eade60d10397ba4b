"""Small engines with loaders: sharded, fused, working on what they load; how to look at them."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import deltasync
from deltasync import (
    ReceiverOptions,
    SenderOptions,
    SyncStats,
    WeightSource,
    WeightTarget,
)
from deltasync.delta.bits import as_bits
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.engines.proof.reach import Reach
from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import DeltaSyncError, SyncAborted
from tests.worlds.links import AMPLE_S, Fleet, Model, fleet, random_model, until

PACKAGE = Path(deltasync.__file__).parent
Weights = Mapping[str, Tensor]
State = dict[str, tuple[int, Tensor]]
"""Address and bits of each tensor, by path."""


def fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def specs(weights: Weights) -> list[CheckpointTensor]:
    return [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]


def state_of(engine: nn.Module) -> State:
    """The address and the bits of all that is reached."""
    founds = Reach([("", engine)]).tensors
    return {p: (f.alias.data_ptr(), as_bits(f.alias).clone()) for p, f in founds.items()}


def check_state(engine: nn.Module, wanted: State, places: State) -> None:
    """The engine has the bits of one state, at the addresses of another."""
    now = state_of(engine)
    assert now.keys() == wanted.keys() == places.keys()
    for path, (address, bits) in now.items():
        if not path.endswith("space"):  # which nobody has written
            assert torch.equal(bits, wanted[path][1]), path
        assert address == places[path][0], path


def is_as(engine: nn.Module, before: State) -> bool:
    now = state_of(engine)
    return all(now[p][0] == at and torch.equal(now[p][1], bits) for p, (at, bits) in before.items())


@contextmanager
def joined(
    source: nn.Module | WeightSource,
    *targets: nn.Module | WeightTarget,
    options: SenderOptions | None = None,
    receiving: ReceiverOptions | None = None,
) -> Iterator[Fleet]:
    """A trainer, and an engine of these ranks that has had its first sync: its `first`."""
    with fleet(source, options=options) as here:
        for number, target in enumerate(targets):
            here.add(target, rank=number, world=len(targets), options=receiving)
        here.wait(len(targets))
        here.first = here.sender.send_weights(timeout_s=AMPLE_S)
        yield here


def fails(here: Fleet, said: str = ".") -> DeltaSyncError:
    """What the engine's first rank raises in a sync that is aborted."""
    serving = here.serving["engine/0"]
    serving.errors.clear()
    with pytest.raises(SyncAborted, match=said):
        here.sender.send_weights(timeout_s=AMPLE_S)
    until(lambda: bool(serving.errors))
    return serving.errors[0]


def recovers(here: Fleet) -> SyncStats:
    """What the next sync says, of all that have rejoined."""
    here.wait(len(here.serving))
    stats = here.sender.send_weights(timeout_s=AMPLE_S)
    assert stats.receivers == len(here.serving)
    return stats


class InterruptedLine:
    """A trace function that raises KeyboardInterrupt at a line of files in a folder.

    Args:
        folder: Of the files.
        left: The line's number, of those that are run.
    """

    def __init__(self, folder: Path, left: int) -> None:
        self.folder, self.left, self.is_raised = str(folder), left, False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if self.is_raised or not code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            self.left -= 1
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            if self.left <= 0 and not text.startswith("with "):  # no signal comes at its end
                self.is_raised = True
                raise KeyboardInterrupt
        return self


# Ranks, none of which needs to hold the whole checkpoint.

SHAPES = {
    "embed": (13, 4),
    "q": (8, 4),
    "kv": (2, 4),
    "fused": (12, 4),  # 4 rows of each of three, one after another
    "o": (4, 8),
    "gate0": (6, 4),
    "gate1": (6, 4),
    "down0": (4, 6),
    "down1": (4, 6),
    "norm": (4,),
    "last": (5, 4),
}
CHECKPOINT = [CheckpointTensor(name, shape, torch.bfloat16) for name, shape in SHAPES.items()]


class Rank(nn.Module):
    """Rows or columns of most tensors, all of some, none of others: of two ranks, or of one.

    q and kv are fused, experts stacked, the rows of `embed` padded, and `o` is transposed.
    """

    dtypes: ClassVar[dict[str, torch.dtype]] = {}

    def __init__(self, rank: int, world: int = 2) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        shapes = {
            "embed": (16 // world, 4),  # 3 of 16 rows are padding
            "qkv": (8 // world + 2, 4),  # a part of q, all of kv
            "fused": (12 // world, 4),
            "o": (8 // world, 4),
            "w1": (2, 6 // world, 4),
            "w2": (2, 4, 6 // world),
            "norm": (4,),
        }
        for name, shape in (shapes | ({"last": (5, 4)} if rank == world - 1 else {})).items():
            weights = torch.zeros(shape, dtype=self.dtypes.get(name, torch.bfloat16))
            self.register_parameter(name, fixed(weights))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(name.rstrip("01"), name[-1], tensor)

    def _load(self, kind: str, last: str, tensor: Tensor) -> None:
        rows, columns = (
            tensor.tensor_split(self.world, dim)[self.rank] if tensor.dim() > dim else tensor
            for dim in (0, 1)
        )
        match kind:
            case "embed":
                live = self._data("embed")
                held = tensor[len(live) * self.rank :][: len(live)]
                live[: len(held)].copy_(held)
                live[len(held) :].zero_()
            case "q":
                self._data("qkv")[:-2].copy_(rows)
            case "kv":
                self._data("qkv")[-2:].copy_(tensor)
            case "fused":
                for third, here in zip(tensor.chunk(3), self._data(kind).chunk(3), strict=True):
                    here.copy_(third.chunk(self.world)[self.rank])
            case "o":
                self._data("o").copy_(columns.T)
            case "gate":
                self._data("w1")[int(last)].copy_(rows)
            case "down":
                self._data("w2")[int(last)].copy_(columns)
            case "last":
                if self.rank == self.world - 1:
                    self._data("last").copy_(tensor)
            case _:
                self._data(kind).copy_(tensor)

    def _data(self, name: str) -> Tensor:
        return self.get_parameter(name).data


class Wide(Rank):
    """Keeps as float32 some of what the checkpoint has as bfloat16."""

    dtypes: ClassVar = {"norm": torch.float32, "last": torch.float32}


def trainer(seed: int) -> Model:
    return random_model(SHAPES, seed)


def rank_of(source: nn.Module, rank: int, world: int = 2, kind: type[Rank] = Rank) -> Rank:
    """What a fresh rank holds of the trainer's weights."""
    made = kind(rank, world)
    made.load_weights(
        (name, weights.data.to(kind.dtypes.get(name, torch.bfloat16)))
        for name, weights in source.named_parameters()
    )
    return made


# Models of many modules with a weight each, as mixtures of experts have them.


class Single(nn.Module):
    """One weight, and a buffer that no checkpoint has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        self.weight = fixed(weight.bfloat16())
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def layers(count: int, seed: int) -> nn.Sequential:
    return nn.Sequential(*(Single(seed + number) for number in range(count)))


def routed(model: nn.Module) -> RoutedTarget:
    """A target of an engine that loads its parameters by their names."""

    def load(weights: Any) -> None:
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)

    return RoutedTarget(model, specs({n: p.data for n, p in model.named_parameters()}), load=load)


# Engines of layers that work on their weights once these are there.


class Layer(nn.Module):
    def load(self, name: str, tensor: Tensor) -> None:
        self.get_parameter(name).data.copy_(tensor)

    def work(self) -> None:
        """What the engine does once weights are there; again, if it is asked to."""


class Layered(nn.Module):
    """Three layers, and parameters beside them.

    Attributes:
        made: Of these layers.
        beside: The shapes of the others, by name.
    """

    made: Callable[[], Layer]
    beside: ClassVar[dict[str, tuple[int, ...]]] = {"norm": (8,)}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.made() for _ in range(3)])
        for name, shape in self.beside.items():
            self.register_parameter(name, fixed(torch.empty(shape, dtype=torch.bfloat16)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.beside:
                self.get_parameter(name).data.copy_(tensor)
                continue
            _, layer, own = name.split(".", 2)
            there = self.layers[int(layer)]
            assert isinstance(there, Layer)
            there.load(own, tensor)

    @classmethod
    def started(cls, weights: Weights) -> Any:
        engine = cls()
        engine.load_weights(weights.items())
        work_on(list(engine.modules()))
        return engine


def of(made: type[Layer], kind: type[Layered] = Layered, **more: object) -> type[Layered]:
    """A kind of engine with these layers."""
    return type(made.__name__, (kind,), {"made": made, **more})


def work_on(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, Layer):
            module.work()


def proof_of(engine: nn.Module, work: Callable[[Sequence[nn.Module]], None] = work_on) -> Proof:
    return Proof(engine, Startup(type(engine), work_on=work))


class Projection(Layer):
    """A weight with a bias, a table, and memory that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = fixed(torch.empty(6, 4, dtype=torch.bfloat16))
        self.sinks = fixed(torch.empty(6, dtype=torch.bfloat16))
        self.table = torch.arange(5).cos()  # of no weights
        self.space = torch.empty(32)  # likewise, and left as it is


class Engine(Layered):
    made = Projection
    beside: ClassVar = {"embed": (8, 4), "head": (8, 4)}


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """Of an `Engine`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(own.shape, generator=generator).bfloat16()
        for name, own in Engine().named_parameters()
    }


class InSet(Projection):
    """Keeps what it packs where no proof can put it back."""

    def work(self) -> None:
        self.packed: set[Tensor] = getattr(self, "packed", set())
        self.packed.clear()
        self.packed.add(self.weight.data * 2)
