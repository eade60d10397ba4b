"""Engines that keep what they compute from their weights where a proof could overlook it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.engines.proof.reach import Reach
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import ConfigError
from tests.sync.test_proved import (
    Engine,
    Layer,
    Reloading,
    checkpoint,
    engines,
    prove,
    prove_reload,
    specs,
    work_on,
    write,
)

Kept = Callable[[Tensor], Any]
"""What an engine keeps of float32[6, 4]."""


class Named(NamedTuple):
    packed: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    packed: Any


class Private:
    __slots__ = ("__packed",)

    def __init__(self, packed: Tensor) -> None:
        self.__packed = packed

    def used(self) -> Tensor:
        return self.__packed


def read_only(values: Tensor) -> Any:
    made = values.numpy().copy()
    made.setflags(write=False)
    return made


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


KINDS: dict[str, tuple[Kept, Callable[[Any], Any]]] = {
    "array": (lambda w: w.numpy().copy(), lambda kept: kept),
    "backwards": (lambda w: w.numpy().copy()[::-1], lambda kept: kept),
    "constant array": (read_only, lambda kept: kept),
    "array of objects": (lambda w: np.array([float(w.max()), None]), lambda kept: kept),
    "number of numpy": (lambda w: w.numpy().max(), lambda kept: kept),
    "number": (lambda w: float(w.max()), lambda kept: kept),
    "numbers": (lambda w: w.flatten().tolist(), lambda kept: kept),
    "tuple": (lambda w: tuple(w.flatten().tolist()), lambda kept: kept),
    "set": (lambda w: set(w.flatten().tolist()), lambda kept: kept),
    "integer": (lambda w: int(w.max() * 1e6), lambda kept: kept),
    "complex": (lambda w: complex(w.max(), w.min()), lambda kept: kept),
    "text": (lambda w: str(w.max()), lambda kept: kept),
    "bytes": (lambda w: w.numpy().tobytes(), lambda kept: kept),
    "bytearray": (lambda w: bytearray(w.numpy().tobytes()), lambda kept: kept),
    "deque": (lambda w: deque([w]), lambda kept: kept[0]),
    "ordered": (lambda w: OrderedDict(a=w), lambda kept: kept["a"]),
    "proxy": (lambda w: MappingProxyType({"a": w}), lambda kept: kept["a"]),
    "named tuple": (Named, lambda kept: kept.packed),
    "named number": (lambda w: Named(float(w.max())), lambda kept: kept.packed),
    "frozen": (Frozen, lambda kept: kept.packed),
    "frozen number": (lambda w: Frozen(float(w.max())), lambda kept: kept.packed),
    "private": (Private, Private.used),
    "partial": (lambda w: partial(max, float(w.max())), lambda kept: kept.args),
    "closure": (lambda w: closure(float(w.max())), lambda kept: kept()),
    "closure of closures": (lambda w: closure(closure(w)), lambda kept: kept()()),
    "cached function": (lambda w: lru_cache(closure(w)), lambda kept: kept()),
    "signs": (torch.sign, lambda kept: kept),
    "positive": (lambda w: w > 0, lambda kept: kept),
}


def keeping(kind: str, *, once: bool) -> tuple[type[Engine], Callable[[Engine], list[str]]]:
    """An engine whose layers keep this, and what it computes with besides its weights."""
    make, read = KINDS[kind]

    class Keeping(Layer):
        def work(self) -> None:
            if not (once and hasattr(self, "kept")):
                self.kept = make(self.weight.data.float() * 2)

    def used(engine: Engine) -> list[str]:
        return [repr(read(layer.kept)) for layer in list[Any](engine.layers)]

    return engines(Keeping), used


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_derived_each_time_follows(kind: str) -> None:
    engine_kind, used = keeping(kind, once=False)
    before, after = checkpoint(0), checkpoint(1)
    engine, target = prove(engine_kind, before)
    assert used(engine) == used(engine_kind.started(before.items()))
    for weights in after, before, after:
        write(target, weights, list(weights))
        assert used(engine) == used(engine_kind.started(weights.items()))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_derived_once_is_refused(kind: str) -> None:
    engine_kind, used = keeping(kind, once=True)
    weights = checkpoint()
    engine = engine_kind.started(weights.items())
    before = used(engine)
    target = RoutedTarget(engine, specs(weights))
    startup = Startup(engine_kind, work_on=work_on)
    with pytest.raises(ConfigError, match=r"'layers.0.kept[^']*': the engine computes with it"):
        target.verify_routes(weights.items(), lambda: Proof(engine, startup))
    assert used(engine) == before


@pytest.mark.parametrize(
    "pack",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        Tensor.to_mkldnn,
        lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
        lambda w: torch.nested.nested_tensor([w[0], w[1]]),
        lambda w: torch.complex(w, w).conj(),
        lambda w: torch.complex(w, w).conj().imag,
    ],
    ids=["sparse", "rows", "mkldnn", "quantised", "nested", "conjugate", "negative"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_compared_are_refused_by_name(pack: Callable[..., Tensor]) -> None:
    class Packing(Layer):
        def work(self) -> None:
            self.packed = pack(self.weight.data.float())

    with pytest.raises(ConfigError, match=r"'layers.0.packed' is sparse, quantised or packed by"):
        prove(engines(Packing), checkpoint())


def test_an_object_that_is_made_anew_with_a_number_is_refused() -> None:
    """Its tensors are written to where they were; the object that is used keeps its number."""

    class Scaled(Layer):
        def work(self) -> None:
            weight = self.weight.data.float()
            self.kernel = SimpleNamespace(packed=weight * 2, scale=float(weight.max()))

    with pytest.raises(ConfigError, match=r"'layers.0.kernel.packed', 'layers.0.kernel.scale'"):
        prove(engines(Scaled), checkpoint())


TABLE = torch.zeros(3, 6, 4)


@pytest.mark.parametrize("is_common", [False, True])
def test_what_layers_write_outside_of_themselves_is_refused(is_common: bool) -> None:
    """Also if both instances have it in common; that is put back."""

    class Pushing(Layer):
        root: Any
        number: int

        def work(self) -> None:
            self.root[0].table[self.number].copy_(self.weight.data * 2)

    class Pushed(Engine):
        made = Pushing

        def __init__(self) -> None:
            super().__init__()
            self.table = TABLE if is_common else torch.zeros(3, 6, 4)
            for number, layer in enumerate(list[Any](self.layers)):
                layer.root, layer.number = [self], number

    with pytest.raises(ConfigError, match="'table' is written by the start of another layer"):
        prove(Pushed, checkpoint())


class Counting(Layer):
    """Notes what is of no weights."""

    def work(self) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        self.absorbed = self.weight.data * 2
        self.address, self.key = self.absorbed.data_ptr(), object()


class Noting(Engine):
    """Notes which names it is given; each start differs by that."""

    made = Counting

    def load_weights(self, weights: Any) -> None:
        weights = list(weights)
        super().load_weights(weights)
        self.names, self.number = [name for name, _ in weights], len(weights)
        for layer in list[Any](self.layers):
            layer.names = tuple(self.names)
            layer.seconds = torch.rand(()).item()


def test_numbers_that_are_of_no_weights_are_no_reason_to_refuse() -> None:
    prove(Noting, checkpoint())


class Scaling(Layer):
    """Computes a number, in a dict that leads to no tensor."""

    once = False

    def work(self) -> None:
        self.state = getattr(self, "state", {})
        if not (self.once and self.state):
            self.state["largest"] = float(self.weight.data.max())


def test_numbers_follow_what_is_reloaded() -> None:
    weights = checkpoint()
    engine: Any = prove_reload(type("Engine", (Reloading,), {"made": Scaling}), weights)
    for number, layer in enumerate(engine.layers):
        assert layer.state == {"largest": float(weights[f"layers.{number}.weight"].max())}
    once = type("Once", (Scaling,), {"once": True})
    with pytest.raises(ConfigError, match=r"'layers.0.state.largest', .*reloading does not"):
        prove_reload(type("Engine", (Reloading,), {"made": once}), weights)


class Filled(Layer):
    """Makes some of its weights with values, and keeps a number that follows from others."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16), requires_grad=False)
        self.kept = torch.ones(6, dtype=torch.bfloat16)

    def work(self) -> None:
        self.most = float(self.weight.max())
        self.kept.copy_(self.sinks.data)


class FilledOnce(Layer):
    """Likewise, but fills it once."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(6, dtype=torch.bfloat16)

    def work(self) -> None:
        self.most = float(self.weight.max())
        if not hasattr(self, "is_worked_on"):
            self.kept.copy_(self.sinks.data)
        self.is_worked_on = True


class ReloadingFilled(Reloading):
    made = Filled


class ReloadingFilledOnce(Reloading):
    made = FilledOnce


def test_weights_that_are_made_with_values_follow() -> None:
    """A second instance holds its own memory for these, each time that it is started."""
    before, after = checkpoint(0), checkpoint(1)
    engine, target = prove(engines(Filled), before)
    write(target, after, list(after))
    for layer in list[Any](engine.layers):
        assert torch.equal(layer.kept, layer.sinks)
        assert layer.most == float(layer.weight.max())
    prove_reload(ReloadingFilled, before)


def test_what_is_made_with_values_and_computed_once_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'layers\.0\.kept'.*: the engine computes with it"):
        prove(engines(FilledOnce), checkpoint())
    with pytest.raises(ConfigError, match=r"'layers\.\d\.kept'.*: the engine computes with it"):
        prove_reload(ReloadingFilledOnce, checkpoint())


def test_numbers_that_lead_to_no_tensor_are_put_back() -> None:
    """Also if the proof refuses, or is broken off."""

    class Dicts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.state: dict[str, Any] = {}

        def work(self) -> None:
            self.state["largest"] = float(self.weight.data.max())
            if not hasattr(self, "absorbed"):
                self.absorbed = self.weight.data * 2

    weights = checkpoint()
    engine = engines(Dicts).started(weights.items())
    target = RoutedTarget(engine, specs(weights))
    startup = Startup(engines(Dicts), work_on=work_on)
    before = [dict(layer.state) for layer in list[Any](engine.layers)]
    with pytest.raises(ConfigError, match=r"layers.0.absorbed"):
        target.verify_routes(weights.items(), lambda: Proof(engine, startup))
    assert [layer.state for layer in list[Any](engine.layers)] == before


def test_expanded_tensors_are_put_back() -> None:
    class Expanded(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.arange(4.0).expand(7, 4)

    prove(engines(Expanded), checkpoint())


def test_bits_of_nan_and_zero_are_put_back() -> None:
    weights = checkpoint()
    for name in weights:
        weights[name].view(torch.int16).view(-1)[:5] = torch.tensor(
            [0x7FC1, 0x7F81, -1, -(1 << 15), 0], dtype=torch.int16
        )
    prove(Engine, weights)


def test_many_objects_in_cycles_are_gone_through_once() -> None:
    class Many(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = [[1.0, n] for n in range(20_000)]
            self.rows.append(self.rows)
            self.numbers = list(range(1_000_000))

    engine = Many.started(checkpoint().items())
    found = Reach([("", engine)])
    assert len(found.values()["numbers"]) == 1_000_000


def test_slots_are_put_back_whatever_their_class_lets_be_set() -> None:
    """As msgspec's structures, which refuse to be set by others than themselves."""

    class Closed:
        __slots__ = ("number", "other")

        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("closed")

    one: Any = Closed()
    frozen = Frozen(1.0)
    object.__setattr__(one, "number", 1)
    found = Reach([("", Holding([one, frozen]))])
    object.__setattr__(one, "number", 2)
    object.__setattr__(one, "other", 3)
    object.__setattr__(frozen, "packed", 2.0)
    found.put_back()
    assert one.number == 1
    assert not hasattr(one, "other")
    assert frozen.packed == 1.0


class Holding(torch.nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held
