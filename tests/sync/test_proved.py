"""What an engine computes with after an update is what a fresh one would compute with, or it is
refused by name."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasync.delta.bits import as_bits
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.other_weights import other_bits
from deltasync.engines.proof.proving import Proof, reached
from deltasync.engines.reloaded import ReloadedTarget
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import ConfigError
from deltasync.testing.processes import Child
from tests.worlds.toy_engines import (
    PACKAGE,
    Engine,
    InterruptedLine,
    Layer,
    Layered,
    Projection,
    check_state,
    checkpoint,
    fixed,
    of,
    proof_of,
    specs,
    state_of,
    work_on,
)

Given = Iterable[tuple[str, Tensor]]


class Kernel:
    """Has no dict."""

    __slots__ = ("__packed",)

    def __init__(self, packed: Tensor) -> None:
        self.pack(packed)

    def pack(self, packed: Tensor) -> None:
        self.__packed = packed

    def packed(self) -> Tensor:
        return self.__packed


def layer(work: Callable[[Any], object], **has: Callable[[Any], object]) -> type[Projection]:
    """A kind of layer that does this work, and has these attributes before."""

    class Made(Projection):
        def __init__(self) -> None:
            super().__init__()
            for name, make in has.items():
                setattr(self, name, make(self))

        def work(self) -> None:
            work(self)

    Made.__name__ = getattr(work, "__name__", "Made")
    return Made


def engine_of(work: Callable[[Any], object], **has: Callable[[Any], object]) -> type[Layered]:
    return of(layer(work, **has), Engine)


def of_view(own: Any) -> None:
    """Of a part of its weight that it keeps from the beginning."""
    own.absorbed = own.part * 2


def beside(own: Any) -> None:
    """In objects that it makes anew: a kernel, a list, a closure, a partial function."""
    doubled = own.weight.data * 2
    own.kernel = Kernel(doubled + 1)
    own.parts = [doubled.clone(), {"last": doubled[1:].clone()}]
    own.linear = lambda x: x @ doubled.T
    own.other = partial(torch.add, doubled - 1)


def flagged(own: Any) -> None:
    """Once, into memory that it has from the beginning."""
    if not own.is_done:
        own.absorbed.copy_(own.weight.data * 2)
        own.is_done = True


def cast_once(own: Any) -> None:
    """Keeps its sinks as float32; those are left alone the second time."""
    if own.impl.sinks.dtype != torch.float32:
        own.impl.sinks = own.impl.sinks.to(torch.float32)


VIEW, BESIDE = layer(of_view, part=lambda own: own.weight[2:].view(-1)), layer(beside)
CAST = layer(cast_once, impl=lambda own: SimpleNamespace(sinks=own.sinks))
SLOTTED = layer(
    lambda own: own.kernel.pack(own.weight.data * 2),
    kernel=lambda own: Kernel(torch.empty(6, 4).bfloat16()),
)


class InLoader(Engine):
    """Computes what it derives at the end of loading, all layers each time."""

    def load_weights(self, weights: Given) -> None:
        super().load_weights(weights)
        for own in list[Any](self.layers):
            own.absorbed = (own.weight.data + own.sinks.data[:, None]).T.contiguous()


def prove(
    kind: type[Layered],
    weights: dict[str, Tensor],
    *,
    sent: Iterable[str] | None = None,
    **options: Any,
) -> tuple[Any, RoutedTarget]:
    """An engine that was started on weights, and a target that is proved."""
    engine = kind.started(weights)
    names = set(weights if sent is None else sent)
    target = RoutedTarget(engine, [one for one in specs(weights) if one.name in names])
    before = state_of(engine)
    try:
        target.verify_routes(weights.items(), lambda: proof_of(engine), **options)
    finally:
        check_state(engine, before, before)
    return engine, target


def write(target: RoutedTarget, weights: dict[str, Tensor], changed: Sequence[str]) -> None:
    """As a delta does."""
    layout = target.parameters()
    lives = target.bind(layout)
    numbers = [n for n, spec in enumerate(layout) if spec.name in changed]
    for number in numbers:
        lives[number].write(0, as_bits(weights[layout[number].name]).view(-1))
    target.finish(numbers)


@pytest.mark.promise(
    "Bits",
    "What an engine computes from its weights is updated in each sync, or `connect` refuses.",
)
@pytest.mark.parametrize("kind", [of(VIEW, Engine), InLoader])
def test_what_is_derived_follows_every_update_in_its_place(kind: type[Layered]) -> None:
    before, after = checkpoint(0), checkpoint(1)
    engine, target = prove(kind, before)
    places = state_of(engine)
    mixed = after | {"layers.1.weight": before["layers.1.weight"]}
    for weights, names in ((after, list(after)), (mixed, ["layers.1.weight"])):
        write(target, weights, names)
        check_state(engine, state_of(kind.started(weights)), places)


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def itself(kept: Any) -> Any:
    return kept


# What an engine keeps of float32[6, 4], and how it uses that.
KEPT: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "array": (lambda w: w.numpy().copy(), itself),
    "numbers": (lambda w: w.flatten().tolist(), itself),
    "set": (lambda w: set(w.flatten().tolist()), itself),
    "private": (Kernel, Kernel.packed),
    "closure of closures": (lambda w: closure(closure(w)), lambda kept: kept()()),
    "signs": (torch.sign, itself),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_derived_each_time_follows_and_what_is_derived_once_is_refused(name: str) -> None:
    make, read = KEPT[name]

    def each_time(own: Any) -> None:
        own.kept = make(own.weight.data.float() * 2)

    def once(own: Any) -> None:
        if not hasattr(own, "kept"):
            each_time(own)

    def used(engine: Any) -> list[str]:
        return [repr(read(layer.kept)) for layer in engine.layers]

    before, after = checkpoint(0), checkpoint(1)
    kind = engine_of(each_time)
    engine, target = prove(kind, before)
    for weights in after, before:
        write(target, weights, list(weights))
        assert used(engine) == used(kind.started(weights))
    engine = engine_of(once).started(before)
    with pytest.raises(ConfigError, match=r"'layers.0.kept[^']*': the engine computes with it"):
        prove_by("routed", engine)
    assert used(engine) == used(engine_of(once).started(before))


# Forms of tensors that cannot be compared.
PACKS: tuple[Callable[[Any], Tensor], ...] = (
    Tensor.to_sparse,
    lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    lambda w: torch.complex(w, w).conj(),
)


def packing(pack: Callable[[Any], Tensor]) -> type[Layered]:
    return engine_of(lambda own: setattr(own, "packed", pack(own.weight.float())))


def with_a_number(own: Any) -> None:
    """Its tensors are written to where they were; the object that is used keeps its number."""
    weight = own.weight.data.float()
    own.kernel = SimpleNamespace(packed=weight * 2, scale=float(weight.max()))


class Pushed(Engine):
    """Its layers write outside of themselves."""

    made = layer(lambda own: own.root[0].table[own.number].copy_(own.weight.data * 2))

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(3, 6, 4)
        for number, own in enumerate(list[Any](self.layers)):
            own.root, own.number = [self], number


STALE = ": the engine computes with it"


@pytest.mark.promise(
    "Bits",
    "What an engine computes from its weights is updated in each sync, or `connect` refuses.",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            engine_of(flagged, absorbed=lambda _: torch.empty(6, 4), is_done=lambda _: False),
            f"'layers.0.absorbed'{STALE}",
        ),
        (of(CAST, Engine), f"'layers.0.impl.sinks'{STALE}"),
        *((packing(pack), "'layers.0.packed' is sparse, quantised or packed by") for pack in PACKS),
        (engine_of(with_a_number), "'layers.0.kernel.packed', 'layers.0.kernel.scale'"),
        (Pushed, "'table' is written by the start of another layer"),
        (
            engine_of(id, watch=lambda own: torch._C._WeakTensorRef(own.weight)),  # type: ignore[attr-defined]
            r"cannot be found out: (?!.*accept_stale_weights)",
        ),
    ],
)
def test_what_would_be_stale_is_refused_by_name(kind: type[Layered], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prove(kind, checkpoint())


def count(own: Any) -> None:
    own.calls = getattr(own, "calls", 0) + 1
    own.absorbed = own.weight.data * 2
    own.address, own.key, own.seconds = own.absorbed.data_ptr(), object(), torch.rand(()).item()


def test_what_is_of_no_weights_is_no_reason_to_refuse() -> None:
    prove(of(layer(count, rows=lambda _: torch.arange(4.0).expand(7, 4)), Engine), checkpoint())


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "`connect` names tensors that the engine does not take, or was started on and does not "
    "receive.",
)
def test_weights_that_the_trainer_does_not_send_are_refused_by_name() -> None:
    weights = checkpoint()
    sent = weights.keys() - {"head"}
    with pytest.raises(ConfigError, match="'head' among them, were loaded from the checkpoint"):
        prove(Engine, weights, sent=sent)
    engine, target = prove(Engine, weights, sent=sent, keep=["hea*"])
    with pytest.raises(ConfigError, match="'head' among them, are not sent by the trainer"):
        target.verify_updates(proof_of(engine))  # where no checkpoint is known
    target.verify_updates(proof_of(engine), keep=["head"])


class Looking(Engine):
    """Looks at values of one tensor while it loads, which a tensor without data does not have."""

    def load_weights(self, weights: Given) -> None:
        for name, tensor in weights:
            assert name != "head" or bool(tensor.isfinite().all())
            super().load_weights([(name, tensor)])


def test_a_tensor_that_cannot_be_watched_hides_no_other_that_is_not_sent() -> None:
    weights = checkpoint()
    with pytest.raises(ConfigError, match="'embed' among them, were loaded from the checkpoint"):
        prove(Looking, weights, sent=weights.keys() - {"head", "embed"})


class Reloading(Engine):
    """Reloads layer by layer, in the way that it does, or does not."""

    reloads: Literal["all", "nothing", "no sinks", "elsewhere", "beside"] = "all"

    def reload(self, weights: Given) -> None:
        match self.reloads:
            case "nothing":
                return
            case "no sinks":  # their loader copies into what reloading throws away
                weights = [one for one in weights if "sinks" not in one[0]]
            case "elsewhere":
                for own in list[Any](self.layers):
                    own.weight = fixed(torch.empty_like(own.weight.data))
        self.load_weights(weights)
        if self.reloads != "beside":
            work_on(list(self.modules()))


def prove_by(way: str, engine: Any) -> None:
    """Routes, or reloading. The engine was started on the first checkpoint, and is as it was."""
    weights, proof, before = checkpoint(), proof_of(engine), state_of(engine)
    try:
        if way == "routed":
            RoutedTarget(engine, specs(weights)).verify_routes(weights.items(), lambda: proof)
        else:
            target = ReloadedTarget(specs(weights), engine.reload, module=engine)
            target.set_loaded_weights(weights.items())
            target.verify_reload(proof)
    finally:
        check_state(engine, before, before)


def number_once(own: Any) -> None:
    own.largest = getattr(own, "largest", float(own.weight.data.max()))


@pytest.mark.parametrize(
    ("reloads", "made", "stale"),
    [
        ("all", Projection, None),
        ("elsewhere", BESIDE, None),
        ("nothing", Projection, "'embed', 'head', 'layers.0.sinks'"),
        ("no sinks", Projection, "'layers.0.sinks', 'layers.1.sinks', 'layers.2.sinks'"),
        ("beside", layer(of_view, part=lambda own: own.weight.data), r"'layers.0.absorbed'"),
        ("all", CAST, r"'layers.0.impl.sinks', 'layers.1.impl.sinks'"),
        ("all", layer(number_once), "'layers.0.largest'"),
    ],
)
def test_reloading_is_held_against_a_fresh_engine(
    reloads: str, made: type[Layer], stale: str | None
) -> None:
    engine = of(made, Reloading, reloads=reloads).started(checkpoint())
    numbers = [vars(own).get("largest") for own in engine.layers]
    with (
        pytest.raises(ConfigError, match=f"{stale}.*computes with it, and reload")
        if stale
        else nullcontext()
    ):
        prove_by("reloaded", engine)
    assert numbers == [vars(own).get("largest") for own in engine.layers]


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A proof puts everything back, whatever is raised. If it cannot, the worker refuses every "
    "request.",
)
@pytest.mark.parametrize(("made", "way"), [(BESIDE, "routed"), (SLOTTED, "reloaded")])
def test_whatever_is_raised_everything_is_put_back(made: type[Layer], way: str) -> None:
    """An interrupt, at lines of the proof."""
    engine, old = of(made, Reloading).started(checkpoint()), sys.gettrace()
    kernels = [own.kernel for own in engine.layers]
    try:
        sys.settrace(counted := InterruptedLine(PACKAGE / "engines" / "proof", sys.maxsize))
        prove_by(way, engine)
        step = (sys.maxsize - counted.left) // 7
        for number in range(1, 7):
            sys.settrace(InterruptedLine(PACKAGE / "engines" / "proof", number * step))
            with suppress(KeyboardInterrupt):
                prove_by(way, engine)
            assert [own.kernel for own in engine.layers] == kernels
    finally:
        sys.settrace(old)


def test_what_came_after_loading_is_left_alone_unless_it_is_a_copy() -> None:
    weights = checkpoint()
    engine = Engine.started(weights)
    own = engine.layers[1]
    own.keys = torch.tensor([])  # a place that is kept for them
    loaded = reached(engine)
    own.cache = own.keys = torch.randn(1 << 10)
    # As compilers keep what they have traced: without memory, or the weights themselves.
    own.traced = [torch.empty(6, 4, device="meta"), own.weight, own.weight.detach().T]
    target = RoutedTarget(engine, specs(weights))
    startup = Startup(Engine, work_on=work_on)
    target.verify_routes(weights.items(), lambda: Proof(engine, startup, loaded))
    with pytest.raises(ConfigError, match=r"'layers.1.cache', .* the engine made when it started"):
        target.verify_routes(weights.items(), lambda: Proof(engine, startup))
    own.packed = own.weight.data.T.float().contiguous()
    with pytest.raises(ConfigError, match=r"'layers.1.packed' is a copy of weights"):
        target.verify_routes(weights.items(), lambda: Proof(engine, startup, loaded))


def gather(own: Any) -> None:
    """Asks the engine's other ranks for what they hold, as vLLM's MLA does."""
    parts = [torch.empty_like(own.weight.data)]
    dist.all_gather(parts, own.weight.data)
    own.gathered = torch.cat(parts)


class SummingLoader(Reloading):
    """Asks the engine's other ranks while it loads."""

    def load_weights(self, weights: Given) -> None:
        super().load_weights(weights)
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("way", ["routed", "reloaded"])
def test_no_rank_waits_for_others_while_it_proves(way: str) -> None:
    """Which may have refused, or prove nothing."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for kind in (of(layer(gather), Reloading), SummingLoader):
            engine = kind.started(checkpoint())
            with pytest.raises(ConfigError, match="its ranks talk to each other"):
                prove_by(way, engine)
    finally:
        dist.destroy_process_group()


LAYERS, ROWS = 10, 2048
LAYER_BYTES = 2 * ROWS * ROWS * 2  # a matrix, and another that is made of it
MOST_LAYERS = 6
M_MMAP_THRESHOLD = -3  # of malloc.h


class Large(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = fixed(torch.empty(ROWS, ROWS, dtype=torch.bfloat16))

    def work(self) -> None:
        self.absorbed = self.weight.data.T.contiguous()


class ManyLayers(Layered):
    beside: ClassVar = {}

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList([Large() for _ in range(LAYERS)])


def prove_many() -> None:
    """In a process of its own, of which the kernel says how much it held at most."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed goes back at once
    weights = {name: torch.rand_like(own) for name, own in ManyLayers().named_parameters()}
    engine = ManyLayers.started(weights)
    target = RoutedTarget(engine, specs(weights))
    before = getrusage(RUSAGE_SELF).ru_maxrss
    target.verify_routes(weights.items(), lambda: proof_of(engine))
    taken = 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)
    assert taken <= MOST_LAYERS * LAYER_BYTES, f"{taken / LAYER_BYTES:.1f} of {LAYERS} layers"


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A proof takes the memory of a few layers.",
)
def test_a_proof_takes_the_memory_of_a_few_layers() -> None:
    with Child(prove_many) as child:
        child.wait(timeout_s=240)


# Other weights.

FLOATS = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_floats_are_smaller_by_10_to_50_percent(dtype: torch.dtype) -> None:
    """Of both signs as well; what is odd differs too."""
    odd = torch.tensor([0.0, 1e-7, 1.0, 1e4, torch.inf, torch.nan]).to(dtype)
    assert bool((as_bits(other_bits(odd, "a")) != as_bits(odd)).all())
    for signs in ((1, 1), (1, -1)):
        values = torch.logspace(-4, 2, 100_000).clamp(min=torch.finfo(dtype).tiny * 4)
        values = (values * torch.tensor(signs).repeat(50_000)).to(dtype)
        ratios = other_bits(values, "a").double() / values.double()
        assert ratios.abs().min() >= 0.5
        assert ratios.abs().max() <= 0.9
