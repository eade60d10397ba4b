"""What an engine computes with after an update is what a fresh one would compute with, or it is
refused by name."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync.delta.bits import as_bits
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.other_weights import other_bits
from deltasync.engines.proof.proving import Proof, reached, scope_of
from deltasync.engines.proof.reach import Reach
from deltasync.engines.reloaded import ReloadedTarget
from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import ConfigError, DirtyReceiver
from tests.worlds.ranks import free_port, run_ranks


class Layer(nn.Module):
    """A projection with a bias, and what a kind of engine makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16), requires_grad=False)
        self.sinks = nn.Parameter(torch.empty(6, dtype=torch.bfloat16), requires_grad=False)
        self.table = torch.arange(5).cos()  # of no weights
        self.space = torch.empty(32)  # likewise, and left as it is

    def work(self) -> None:
        """What the engine does once weights are there; again, if it is asked to."""


class Engine(nn.Module):
    """Layers, an embedding, and a head of its own.

    Attributes:
        made: Of these layers.
    """

    made: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.made() for _ in range(3)])
        self.embed = nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)

    @classmethod
    def started(cls, weights: Iterable[tuple[str, Tensor]]) -> Engine:
        engine = cls()
        engine.load_weights(weights)
        work_on(list(engine.modules()))
        return engine


def work_on(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, Layer):
            module.work()


class InterruptedAt:
    """`work_on`, which is interrupted once: at the end of this call."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, modules: Sequence[nn.Module]) -> None:
        self.calls += 1
        work_on(modules)
        if self.calls == self.at:
            raise KeyboardInterrupt


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (8, 4), "head": (8, 4)}
    shapes |= {f"layers.{n}.weight": (6, 4) for n in range(3)}
    shapes |= {f"layers.{n}.sinks": (6,) for n in range(3)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def specs(weights: dict[str, Tensor]) -> list[CheckpointTensor]:
    return [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]


class Again(Layer):
    """Computes anew each time, into other storage."""

    def work(self) -> None:
        self.absorbed = self.weight.data.T.contiguous() * 2


class OfView(Layer):
    """Keeps a part of its weight from the beginning, and computes with that."""

    def __init__(self) -> None:
        super().__init__()
        self.part = self.weight[2:].view(-1)

    def work(self) -> None:
        self.absorbed = self.part * 2


class Beside(Layer):
    """Likewise, in objects that it makes anew: a kernel, a list, a closure, a partial function."""

    def work(self) -> None:
        doubled = self.weight.data * 2
        self.kernel = Kernel(doubled + 1)
        self.parts = [doubled.clone(), {"last": doubled[1:].clone()}]
        self.linear = lambda x: x @ doubled.T
        self.other = partial(torch.add, doubled - 1)


class Kernel:
    __slots__ = ("packed",)

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed


class Once(Layer):
    """Computes only the first time."""

    def work(self) -> None:
        if not hasattr(self, "absorbed"):
            self.absorbed = self.weight.data * 2


class Flagged(Layer):
    """Likewise, into memory that it has from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.absorbed, self.is_done = torch.empty(6, 4), False

    def work(self) -> None:
        if not self.is_done:
            self.absorbed.copy_(self.weight.data * 2)
            self.is_done = True


class Cast(Layer):
    """Keeps its sinks as float32; those are left alone the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.impl: Any = type("Impl", (), {})()
        self.impl.sinks = self.sinks

    def work(self) -> None:
        if self.impl.sinks.dtype != torch.float32:
            self.impl.sinks = self.impl.sinks.to(torch.float32)


class Unseen(Layer):
    """Keeps what it packs in a list of modules that are not registered, and packs once."""

    def work(self) -> None:
        if not hasattr(self, "others"):
            self.others = [nn.Module()]
            self.others[0].packed = self.weight.data.flip(0)


class Slotted(Layer):
    """Puts what it packs into an object that it keeps, and that has no dict."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel(torch.empty(6, 4, dtype=torch.bfloat16))

    def work(self) -> None:
        self.kernel.packed = self.weight.data * 2


class InSet(Layer):
    """Keeps what it packs where no proof can put it back."""

    def work(self) -> None:
        self.packed: set[Tensor] = getattr(self, "packed", set())
        self.packed.clear()
        self.packed.add(self.weight.data * 2)


def engines(layer: type[Layer]) -> type[Engine]:
    return type("Engine", (Engine,), {"made": layer})


class InLoader(Engine):
    """Computes what it derives at the end of loading, all layers each time."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        for layer in list[Any](self.layers):
            layer.absorbed = (layer.weight.data + layer.sinks.data[:, None]).T.contiguous()


class ForLoaded(Engine):
    """Likewise, for the layers that were loaded."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        weights = list(weights)
        super().load_weights(weights)
        for number in sorted({int(n.split(".")[1]) for n, _ in weights if n.endswith("t")}):
            layer: Any = self.layers[number]
            layer.absorbed = layer.weight.data * 2


def prove(
    kind: type[Engine],
    weights: dict[str, Tensor],
    *,
    sent: Iterable[str] | None = None,
    **options: Any,
) -> tuple[Engine, RoutedTarget]:
    """An engine that was started on weights, and a target that is proved."""
    engine = kind.started(weights.items())
    names = set(weights if sent is None else sent)
    target = RoutedTarget(engine, [one for one in specs(weights) if one.name in names])
    before = snapshot(engine)
    try:
        target.verify_routes(
            weights.items(), lambda: Proof(engine, Startup(kind, work_on=work_on)), **options
        )
    finally:
        assert_same(snapshot(engine), before)
    return engine, target


def snapshot(engine: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Address and bits of everything, by path."""
    found = Reach([("", engine)]).tensors
    return {path: (one.alias.data_ptr(), one.alias.clone()) for path, one in found.items()}


def assert_same(
    left: dict[str, tuple[int, Tensor]],
    right: dict[str, tuple[int, Tensor]],
    *,
    places: bool = True,
) -> None:
    assert left.keys() == right.keys()
    for path, (address, tensor) in left.items():
        if not path.endswith("space"):
            assert torch.equal(as_bits(tensor), as_bits(right[path][1])), path
        assert not places or address == right[path][0], path


def write(target: RoutedTarget, weights: dict[str, Tensor], changed: Sequence[str]) -> None:
    """As a delta does."""
    layout = target.parameters()
    lives = target.bind(layout)
    numbers = [n for n, spec in enumerate(layout) if spec.name in changed]
    for number in numbers:
        bits = as_bits(weights[layout[number].name])
        lives[number].write(0, bits.view(-1))
    target.finish(numbers)


@pytest.mark.promise(
    "Bits",
    "What an engine computes from its weights is updated in each sync, or `connect` refuses.",
)
@pytest.mark.parametrize(
    "kind",
    [Engine, engines(Again), engines(OfView), engines(Beside), InLoader, ForLoaded],
    ids=lambda k: k.made.__name__ if k.__name__ == "Engine" else k.__name__,
)
def test_what_is_derived_follows_every_update_in_its_place(kind: type[Engine]) -> None:
    before, after = checkpoint(0), checkpoint(1)
    engine, target = prove(kind, before)
    places = {path: address for path, (address, _) in snapshot(engine).items()}
    write(target, after, list(after))
    assert_same(snapshot(engine), snapshot(kind.started(after.items())), places=False)
    assert {path: address for path, (address, _) in snapshot(engine).items()} == places
    mixed = after | {"layers.1.weight": before["layers.1.weight"]}
    write(target, mixed, ["layers.1.weight"])
    assert_same(snapshot(engine), snapshot(kind.started(mixed.items())), places=False)


@pytest.mark.promise(
    "Bits",
    "What an engine computes from its weights is updated in each sync, or `connect` refuses.",
)
@pytest.mark.parametrize(
    ("layer", "path"),
    [
        (Once, "layers.0.absorbed"),
        (Flagged, "layers.0.absorbed"),
        (Cast, "layers.0.impl.sinks"),
        (Unseen, "layers.0.others.0.packed"),
    ],
)
def test_what_would_be_stale_is_refused_by_name(layer: type[Layer], path: str) -> None:
    with pytest.raises(ConfigError, match=f"'{path}': the engine computes with it"):
        prove(engines(layer), checkpoint())


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
    prove(Engine, weights, sent=sent, keep=["hea*"])


def test_weights_that_nobody_sends_are_refused_where_no_checkpoint_is_known() -> None:
    weights = checkpoint()
    engine = Engine.started(weights.items())
    proof = Proof(engine, Startup(Engine, work_on=work_on))
    target = RoutedTarget(engine, [one for one in specs(weights) if one.name != "head"])
    with pytest.raises(ConfigError, match="'head' among them, are not sent by the trainer"):
        target.verify_updates(proof)
    target.verify_updates(proof, keep=["head"])


class Reloading(Engine):
    """Reloads layer by layer, in the way that it does, or does not."""

    reloads: Literal["all", "nothing", "no sinks", "elsewhere", "beside"] = "all"

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        match self.reloads:
            case "nothing":
                return
            case "no sinks":  # their loader copies into what reloading throws away
                weights = [one for one in weights if "sinks" not in one[0]]
            case "elsewhere":
                for layer in self.layers:
                    layer.weight = nn.Parameter(
                        torch.empty_like(cast("Tensor", layer.weight)), requires_grad=False
                    )
        self.load_weights(weights)
        if self.reloads != "beside":
            work_on(list(self.modules()))


class SlottedReloading(Reloading):
    made = Slotted


def prove_by(way: str, engine: Reloading, weights: dict[str, Tensor], startup: Startup) -> None:
    """Routes, or reloading."""
    proof = Proof(engine, startup)
    if way == "routed":
        RoutedTarget(engine, specs(weights)).verify_routes(weights.items(), lambda: proof)
    else:
        target = ReloadedTarget(specs(weights), engine.reload, module=engine)
        target.set_loaded_weights(weights.items())
        target.verify_reload(proof)


def prove_reload(kind: type[Reloading], weights: dict[str, Tensor]) -> Reloading:
    engine = kind.started(weights.items())
    assert isinstance(engine, Reloading)
    target = ReloadedTarget(specs(weights), engine.reload, module=engine)
    target.set_loaded_weights(weights.items())
    before = snapshot(engine)
    try:
        target.verify_reload(Proof(engine, Startup(kind, work_on=work_on)))
    finally:
        assert_same(snapshot(engine), before)
    return engine


@pytest.mark.parametrize(
    ("reloads", "layer", "stale"),
    [
        ("all", Layer, None),
        ("all", Again, None),
        ("elsewhere", Again, None),
        ("all", Beside, None),
        ("nothing", Layer, "'embed', 'head', 'layers.0.sinks'"),
        ("no sinks", Layer, "'layers.0.sinks', 'layers.1.sinks', 'layers.2.sinks'"),
        ("beside", Again, r"'layers.0.absorbed', 'layers.1.absorbed'"),
        ("all", Once, r"'layers.0.absorbed', 'layers.1.absorbed'"),
        ("all", Cast, r"'layers.0.impl.sinks', 'layers.1.impl.sinks'"),
    ],
)
def test_reloading_is_held_against_a_fresh_engine(
    reloads: str, layer: type[Layer], stale: str | None
) -> None:
    kind = type("Engine", (Reloading,), {"made": layer, "reloads": reloads})
    if stale is None:
        prove_reload(kind, checkpoint())
    else:
        with pytest.raises(ConfigError, match=f"{stale}.*computes with it, and reload"):
            prove_reload(kind, checkpoint())


def test_what_cannot_be_put_back_is_no_refusal() -> None:
    """After a refusal the engine is as it was."""
    weights = checkpoint()
    engine = engines(InSet).started(weights.items())
    target = RoutedTarget(engine, specs(weights))
    with pytest.raises(DirtyReceiver, match=r"could not be put back .*restart the engine"):
        target.verify_routes(
            weights.items(), lambda: Proof(engine, Startup(engines(InSet), work_on=work_on))
        )


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("kind", ["routed", "reloaded"])
def test_what_an_object_keeps_in_a_slot_is_put_back(at: int, kind: str) -> None:
    """Also when the engine's work on it breaks off the proof."""
    weights = checkpoint()
    engine = SlottedReloading.started(weights.items())
    assert isinstance(engine, SlottedReloading)
    before = snapshot(engine)
    with suppress(KeyboardInterrupt, ConfigError):
        prove_by(kind, engine, weights, Startup(SlottedReloading, work_on=InterruptedAt(at)))
    assert_same(snapshot(engine), before)


@pytest.mark.parametrize("function", ["_swap", "_with_memory", "restore"])
def test_an_interrupt_while_a_fresh_engine_is_given_memory_stays_one(function: str) -> None:
    """At each of the function's lines."""
    weights, kind = checkpoint(), engines(Beside)
    engine = kind.started(weights.items())
    before = snapshot(engine)
    target = RoutedTarget(engine, specs(weights))
    target.verify_routes(weights.items())
    left = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_name != function:
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    for number in range(1, 41):
        left, old = number, sys.gettrace()
        try:
            sys.settrace(trace)
            with pytest.raises(KeyboardInterrupt):
                target.verify_routes(
                    weights.items(), lambda: Proof(engine, Startup(kind, work_on=work_on))
                )
        finally:
            sys.settrace(old)
        assert_same(snapshot(engine), before)


# A signal that comes in a callback of the garbage collector ends nothing but that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_proof_that_is_interrupted_at_any_moment_puts_everything_back() -> None:
    """By a signal, as Ctrl-C does, after so much time of a processor."""
    weights, kind = checkpoint(), engines(Beside)
    engine = kind.started(weights.items())
    before = snapshot(engine)

    def proof() -> Proof:
        return Proof(engine, Startup(kind, work_on=work_on))

    target = RoutedTarget(engine, specs(weights))
    target.verify_routes(weights.items())  # what is found out before the proof is known then
    began = time.process_time()
    target.verify_routes(weights.items(), proof)
    whole_s = time.process_time() - began
    interrupts = 0
    old = signal.signal(signal.SIGPROF, signal.default_int_handler)
    try:
        for number in range(1, 60):
            with suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_PROF, whole_s * number / 60)
                    target.verify_routes(weights.items(), proof)
                except KeyboardInterrupt:
                    interrupts += 1
                    raise
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
            assert_same(snapshot(engine), before)
    finally:
        signal.signal(signal.SIGPROF, old)
    assert interrupts > 20


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A proof puts everything back, whatever is raised. If it cannot, the worker refuses every "
    "request.",
)
@pytest.mark.parametrize("at", range(1, 40, 3))
def test_whatever_is_raised_everything_is_put_back(at: int) -> None:
    """At each call of what an engine does."""
    weights, kind = checkpoint(), engines(Beside)
    engine = kind.started(weights.items())
    before = snapshot(engine)
    kernels = [layer.kernel for layer in list[Any](engine.layers)]
    target = RoutedTarget(engine, specs(weights))
    interrupted = InterruptedAt(at)
    startup = Startup(kind, work_on=interrupted)
    try:
        target.verify_routes(weights.items(), lambda: Proof(engine, startup))
    except KeyboardInterrupt:
        assert interrupted.calls == at
    assert_same(snapshot(engine), before)
    assert [layer.kernel for layer in list[Any](engine.layers)] == kernels


def test_what_came_after_loading_is_left_alone_unless_it_is_a_copy() -> None:
    weights = checkpoint()
    engine = Engine.started(weights.items())
    layer: Any = engine.layers[1]
    layer.keys = torch.tensor([])  # a place that is kept for them
    loaded = reached(engine)
    layer.cache = layer.keys = torch.randn(1 << 10)
    # As compilers keep what they have traced: without memory, or the weights themselves.
    layer.traced = [torch.empty(6, 4, device="meta"), layer.weight, layer.weight.detach().T]
    target = RoutedTarget(engine, specs(weights))
    startup = Startup(Engine, work_on=work_on)
    target.verify_routes(weights.items(), lambda: Proof(engine, startup, loaded))
    with pytest.raises(ConfigError, match=r"'layers.1.cache', .* the engine made when it started"):
        target.verify_routes(weights.items(), lambda: Proof(engine, startup))
    layer.packed = layer.weight.data.T.float().contiguous()
    with pytest.raises(ConfigError, match=r"'layers.1.packed' is a copy of weights"):
        target.verify_routes(weights.items(), lambda: Proof(engine, startup, loaded))


def test_an_engine_that_cannot_be_made_without_memory_is_refused() -> None:
    class Measuring(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.scale = self.embed.abs().max().item()

    with pytest.raises(ConfigError, match="making its model without memory raised"):
        prove(Measuring, checkpoint())


def test_an_engine_whose_parts_cannot_be_given_memory_is_refused() -> None:
    class Watching(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.watch = torch._C._WeakTensorRef(self.weight)  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=r"cannot be found out: .*accept_stale_weights"):
        prove(engines(Watching), checkpoint())


@given(
    dtype=st.sampled_from(
        [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8]
    ),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.0, 1e-7, 1.0, 1e4]),
)
def test_other_bits_are_other_everywhere(dtype: torch.dtype, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(7, 5, generator=generator) * scale
    values[0, :3] = torch.tensor([0.0, torch.inf, torch.nan])
    tensor = values.to(dtype)
    other = other_bits(tensor, "a")
    assert (other.shape, other.dtype) == (tensor.shape, dtype)
    assert torch.equal(as_bits(other), as_bits(other_bits(tensor, "a")))
    if dtype.is_floating_point:
        assert bool((as_bits(other) != as_bits(tensor)).all())
        if tensor.float().signbit().all() or not tensor.float().signbit().any():
            assert torch.equal(tensor.float().signbit(), other.float().signbit())
    else:
        assert torch.equal(other.flatten().sort().values, tensor.flatten().sort().values)


FLOATS = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)], ids=str)
def test_other_floats_are_smaller_by_10_to_50_percent(
    dtype: torch.dtype, signs: tuple[int, int]
) -> None:
    """With the other sign, half of them, if there are both."""
    normal = torch.finfo(dtype).tiny * 4
    values = torch.logspace(-4, 2, 100_000).clamp(min=normal)
    values = (values * torch.tensor(signs).repeat(50_000)).to(dtype)
    ratios = other_bits(values, "a").double() / values.double()
    assert 0.5 <= ratios.abs().min() <= 0.58
    assert 0.83 <= ratios.abs().max() <= 0.9
    turned = (ratios < 0).double().mean()
    assert 0.49 < turned < 0.51 if signs == (1, -1) else turned == 0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e8m0fnu], ids=str)
def test_equal_floats_become_different_ones_at_each_place(dtype: torch.dtype) -> None:
    ones = torch.ones(600_000).to(dtype)
    first, second = (as_bits(other_bits(ones, name)) for name in "ab")
    for step in (1, 64, 4096, 1 << 18):  # elements, rows, blocks are in another order
        assert not torch.equal(first[step:], first[:-step])
    assert not torch.equal(first[:64], second[:64])
    one, two = as_bits(torch.tensor([1.0, 2.0]).to(dtype)).tolist()
    assert len(set(first.tolist())) >= max(2, min(90, (two - one) * 3 // 4))


class Gathering(Layer):
    """Asks the engine's other ranks for what they hold, as vLLM's MLA does."""

    def work(self) -> None:
        parts = [torch.empty_like(self.weight.data) for _ in range(2)]
        dist.all_gather(parts, self.weight.data)
        self.gathered = torch.cat(parts)


class Refused(Gathering):
    """Likewise; nothing brings up to date what it keeps besides."""

    def work(self) -> None:
        if not hasattr(self, "absorbed"):
            self.absorbed = self.weight.data * 2
        super().work()


def prove_as_a_rank(rank: int, way: str, port: int) -> None:
    """One of two. The first refuses before the other one."""
    address = f"tcp://127.0.0.1:{port}"
    long = timedelta(seconds=100)  # more than this test may take
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=long)
    weights, made = checkpoint(), (Refused, Gathering)[rank]
    kind = type("Engine", (Reloading,), {"made": made})
    engine = cast("type[Reloading]", kind).started(weights.items())
    assert isinstance(engine, Reloading)
    before = snapshot(engine)
    with pytest.raises(ConfigError, match=r"its ranks talk to each other .*allgather"):
        prove_by(way, engine, weights, Startup(kind, work_on=work_on))
    assert_same(snapshot(engine), before)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["routed", "reloaded"])
def test_no_rank_waits_for_one_that_refuses(way: str) -> None:
    run_ranks(prove_as_a_rank, 2, way, free_port(), timeout_s=40)


class SummingLoader(Reloading):
    """Asks the engine's other ranks while it loads."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        dist.all_reduce(torch.ones(1))


def prove_alone(rank: int, way: str, port: int) -> None:
    """One of two. The first proves nothing."""
    address = f"tcp://127.0.0.1:{port}"
    long = timedelta(seconds=100)  # more than this test may take
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=long)
    weights = checkpoint()
    engine = cast("Reloading", SummingLoader.started(weights.items()))
    if rank == 1:
        before = snapshot(engine)
        with pytest.raises(ConfigError, match=r"its ranks talk to each other .*allreduce") as error:
            prove_by(way, engine, weights, Startup(SummingLoader, work_on=work_on))
        assert "without_routes" not in str(error.value)  # which helps as little
        assert_same(snapshot(engine), before)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["routed", "reloaded"])
def test_a_loader_that_waits_for_other_ranks_is_refused_where_it_is_watched(way: str) -> None:
    run_ranks(prove_alone, 2, way, free_port(), timeout_s=40)


def test_layers_are_told_by_the_first_number() -> None:
    assert scope_of("model.layers.12.mlp.experts.3.weight") == "model.layers.12"
    assert scope_of("0.weight") == "0"
    assert scope_of("lm_head.weight") == ""
    assert scope_of("model.conv1.weight") == ""
