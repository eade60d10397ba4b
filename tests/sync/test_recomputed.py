"""What an engine computed of small tensors follows every sync, or the old version stays whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ReceiverOptions, WeightReceiver
from deltasync.delta.bits import as_bits
from deltasync.engines.learnt import LearntTarget
from deltasync.engines.proof.learnt import learn_routes
from deltasync.engines.proof.reach import Reach
from deltasync.engines.proof.recomputed import Learnt
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import ConfigError, EngineFailed, SyncAborted
from deltasync.sync.protocol.receiver_session import ReceiverState
from tests.engines.checkpoints import Weights
from tests.engines.repacked import tiles_of_marlin
from tests.sync.test_learnt import Engine, Matrix, proof_of
from tests.sync.test_learnt import checkpoint as matrices
from tests.worlds.links import Fleet, Serving, StubbornLearnt, fleet, until

FP8 = torch.float8_e4m3fn
State = dict[str, tuple[int, Tensor]]


def fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Kernel:
    """Holds what it computes with outside of parameters."""

    def __init__(self, limit: Tensor) -> None:
        self.limit = limit


class Fused(Matrix):
    """Two fused matrices with a scale for each besides, and a scale of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = fixed(torch.empty(2))
        self.inputs = fixed(torch.empty(2))

    def work(self) -> None:
        super().work()
        self.whole = fixed(1 / self.whole.data.max())
        self.inverse = fixed(self.inputs.data.max())
        self.inputs = fixed(1 / self.inverse.data)
        self.alpha = fixed(self.whole.data * self.inputs.data)
        self.kernel = Kernel(self.alpha.data * 448)


class FusedEngine(Engine):
    made = Fused


def checkpoint(seed: int) -> dict[str, Tensor]:
    found = matrices(seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(3):
        for part in range(2):
            for name in ("whole", "inputs"):
                drawn = torch.randn(1, generator=generator).exp()
                found[f"layers.{layer}.{part}.{name}"] = drawn
    return found


def learnt_of(
    engine: Engine, weights: dict[str, Tensor], beside: dict[str, Tensor] | None = None
) -> tuple[list[CheckpointTensor], Learnt]:
    tensors = [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    return tensors, learn_routes(proof_of(engine), tensors, beside)


def verified(
    engine: Engine, weights: dict[str, Tensor], kind: type[LearntTarget] = LearntTarget
) -> LearntTarget:
    target = kind(engine, *learnt_of(engine, weights))
    target.verify_routes(weights.items(), lambda: proof_of(engine))
    return target


def state_of(engine: nn.Module) -> State:
    """The address and the bits of all that is reached."""
    founds = Reach([("", engine)]).tensors
    return {p: (f.alias.data_ptr(), as_bits(f.alias).clone()) for p, f in founds.items()}


def check_is(engine: Engine, weights: dict[str, Tensor], before: State) -> None:
    """It holds what a fresh engine holds, where it was."""
    wanted, now = state_of(type(engine).started(weights)), state_of(engine)
    assert wanted.keys() == now.keys() == before.keys()
    for path, (address, bits) in now.items():
        assert torch.equal(bits, wanted[path][1]), path
        assert address == before[path][0], path


def is_as(engine: Engine, before: State) -> bool:
    now = state_of(engine)
    return all(now[p][0] == at and torch.equal(now[p][1], bits) for p, (at, bits) in before.items())


@contextmanager
def followed(
    engine: Engine, first: dict[str, Tensor], kind: type[LearntTarget] = LearntTarget
) -> Iterator[tuple[Fleet, Weights, Serving]]:
    """A trainer of these weights, and the engine, which has joined."""
    source = Weights({name: tensor.clone() for name, tensor in first.items()})
    with fleet(source) as here:
        serving = here.add(verified(engine, first, kind))
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        yield here, source, serving


@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
@settings(max_examples=10)
@given(st.integers(0, 1 << 20), st.lists(st.sampled_from(["weight", "scale", "whole", "inputs"])))
def test_any_history_leaves_what_the_engine_would_make(seed: int, changed: list[str]) -> None:
    now = checkpoint(seed)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, _):
        assert is_as(engine, before)
        for number, part in enumerate((*changed, "")):
            new = checkpoint(seed + number + 1)
            now = now | {n: t for n, t in new.items() if n.endswith(part)}
            source.take(now)
            assert here.sender.send_weights().kind == "delta"
            check_is(engine, now, before)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38, float("inf"), float("nan"), -1.0])
def test_odd_values_are_computed_as_the_engine_does(value: float) -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, _):
        now = now | {n: torch.full_like(t, value) for n, t in now.items() if n.endswith("whole")}
        source.take(now)
        here.sender.send_weights()
        check_is(engine, now, before)


def test_one_part_of_a_maximum_is_enough() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, _):
        for layer, part, value in ((0, 0, 50.0), (2, 1, 70.0), (0, 0, 0.1)):
            now = now | {f"layers.{layer}.{part}.inputs": torch.tensor([value])}
            source.take(now)
            here.sender.send_weights()
            check_is(engine, now, before)


def test_a_receiver_that_joins_late_computes_too() -> None:
    engine, new = FusedEngine.started(checkpoint(0)), checkpoint(1)
    before = state_of(engine)
    with fleet(Weights(new)) as here:
        here.add(LearntTarget(engine, *learnt_of(engine, new)))
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        check_is(engine, new, before)


class Rounded(Matrix):
    """Its scales become powers of two."""

    def work(self) -> None:
        super().work()
        bits = self.scale.data.view(torch.int32) >> 23 << 23
        self.scale = fixed(bits.view(torch.float32))


class Twice(Matrix):
    """Keeps its scales a second time, transposed."""

    def work(self) -> None:
        kept = self.scale.data.t().contiguous()
        super().work()
        self.other = fixed(kept)


class Dropped(Matrix):
    """Needs no scales after loading."""

    def work(self) -> None:
        super().work()
        del self.scale


class Clamped(Matrix):
    """Its scales are clamped where they are."""

    def work(self) -> None:
        self.weight = fixed(self.weight.data.t().contiguous())
        self.scale.data.clamp_(min=0.5)


class Inner(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = fixed(torch.empty(rows, 8, dtype=FP8))
        self.scale = fixed(torch.empty(rows // 4, 2))


class Outer(Matrix):
    """Its tensors are in a module of their own, and are worked on from outside."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale, self.weight
        self.inner = Inner(16)

    def load(self, which: str, part: int, tensor: Tensor) -> None:
        super().load(f"inner.{which}", part, tensor)

    def work(self) -> None:
        self.inner.weight = fixed(self.inner.weight.data.t().contiguous())
        self.inner.scale = fixed(1 / self.inner.scale.data)


class Joint(Matrix):
    """Two modules are given the larger one of their scales, once."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale, self.weight
        self.parts = nn.ModuleDict({"a": Inner(8), "b": Inner(8)})
        self.worked_on = 0

    def load(self, which: str, part: int, tensor: Tensor) -> None:
        self.parts["ab"[part]].get_parameter(which).data.copy_(tensor)

    def work(self) -> None:
        if self.worked_on:
            return
        self.worked_on += 1
        self.largest = torch.maximum(*(one.scale.data.max() for one in self.inner()))
        for one in self.inner():
            one.weight = fixed(one.weight.data.t().contiguous())
            one.scale = fixed(one.scale.data / self.largest)

    def inner(self) -> list[Inner]:
        return [one for one in self.parts.values() if isinstance(one, Inner)]


@pytest.mark.parametrize("made", [Rounded, Twice, Dropped, Clamped, Outer, Joint])
def test_what_follows_from_small_tensors_alone_is_computed_again(made: type[Matrix]) -> None:
    class Kind(Engine):
        pass

    Kind.made = made
    now = matrices(0)
    engine = Kind.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, _):
        for seed in (1, 2):
            source.take(now := matrices(seed))
            here.sender.send_weights()
            check_is(engine, now, before)


class Mixed(Fused):
    """One of its scales follows from the codes, too."""

    def work(self) -> None:
        largest = as_bits(self.weight.data).max().float()
        super().work()
        self.alpha = fixed(self.alpha.data * largest)


class Random(Fused):
    """Does not make the same twice."""

    def work(self) -> None:
        super().work()
        self.whole = fixed(self.whole.data * (1 + torch.rand(())))


class Number(Fused):
    """What it computes becomes a number of Python."""

    def work(self) -> None:
        super().work()
        self.factor = float(self.alpha)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Mixed, r"layers\.\d\.(\d\.whole|alpha|kernel\.limit)"),
        (Random, r"layers\.\d\.(\d\.)?whole"),
        (Number, r"layers\.\d\.factor"),
    ],
)
def test_what_cannot_be_computed_again_is_refused_by_name(made: type[Fused], said: str) -> None:
    class Kind(FusedEngine):
        pass

    Kind.made = made
    first = checkpoint(0)
    engine = Kind.started(first)
    before = state_of(engine)
    with pytest.raises(ConfigError, match=said):
        verified(engine, first)
    assert is_as(engine, before)


class Failing(Fused):
    """Works for a while."""

    fails = False

    def work(self) -> None:
        if type(self).fails:
            raise ZeroDivisionError("planted")
        super().work()


class FailingEngine(FusedEngine):
    made = Failing


@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
def test_an_engine_whose_code_raises_keeps_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    now = checkpoint(0)
    engine = FailingEngine.started(now)
    with followed(engine, now) as (here, source, serving):
        source.take(now := checkpoint(1))
        here.sender.send_weights()
        before = state_of(engine)
        monkeypatch.setattr(Failing, "fails", True)
        source.take(now := checkpoint(2))
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[0], EngineFailed)
        assert "planted" in str(serving.errors[0])
        assert "'layers.0'" in str(serving.errors[0])
        assert not serving.receiver.is_dirty
        assert is_as(engine, before)
        monkeypatch.setattr(Failing, "fails", False)
        here.wait(1)
        here.sender.send_weights()
        check_is(engine, now, before)


class Elsewhere(Fused):
    """Puts one more tensor somewhere, or one of its results, once it is told where."""

    place = ""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, object] = {"list": [], "deque": deque()}

    def work(self) -> None:
        loaded, place = self.whole, type(self).place
        super().work()
        kernel, inverse = self.kernel, self.inverse
        assert isinstance(kernel, Kernel)
        match place:
            case "another attribute":
                self.whole, self.other = loaded, self.whole
            case "another parameter":
                self.inverse, self.second = fixed(torch.zeros(())), inverse
            case "a kernel of another class":
                self.kernel = OtherKernel(kernel.limit)
            case "another attribute of a kernel":
                kernel.other, kernel.limit = kernel.limit, torch.zeros(())  # type: ignore[attr-defined]
            case "a parameter's attribute":
                loaded.other = kernel.limit  # type: ignore[attr-defined]
                self.loaded = loaded
            case "dict":
                self.config["whole"] = self.whole
            case "list" | "deque":
                self.config[place].append(self.whole)  # type: ignore[attr-defined]
            case "another shape":
                kernel.limit = kernel.limit.view(1)
            case "a missing one":
                del self.inverse


class OtherKernel(Kernel):
    """Computes in another way with the same tensors."""


class ElsewhereEngine(FusedEngine):
    made = Elsewhere


@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
@pytest.mark.parametrize(
    "place",
    [
        *("another attribute", "another parameter", "a kernel of another class"),
        *("another attribute of a kernel", "a parameter's attribute", "dict", "list", "deque"),
        *("another shape", "a missing one"),
    ],
)
def test_what_goes_elsewhere_than_at_connect_fails_the_sync(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps its version, and follows when its code does as it did."""
    now = checkpoint(0)
    engine = ElsewhereEngine.started(now)
    with followed(engine, now) as (here, source, serving):
        source.take(now := checkpoint(1))
        here.sender.send_weights()
        before = state_of(engine)
        monkeypatch.setattr(Elsewhere, "place", place)
        source.take(now := checkpoint(2))
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[0], EngineFailed)
        assert "'layers.0'" in str(serving.errors[0])
        assert not serving.receiver.is_dirty
        assert is_as(engine, before)
        monkeypatch.setattr(Elsewhere, "place", "")
        here.wait(1)
        here.sender.send_weights()
        check_is(engine, now, before)


class Attached(Clamped):
    """Attaches what it computes to the parameter that was loaded, once it is told to."""

    attaches = False

    def work(self) -> None:
        super().work()
        if type(self).attaches:
            self.scale.clamped = self.scale.data.clone()  # type: ignore[attr-defined]


class AttachedEngine(Engine):
    made = Attached


def test_what_is_attached_to_a_loaded_parameter_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = matrices(0)
    engine = AttachedEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, serving):
        monkeypatch.setattr(Attached, "attaches", True)
        source.take(matrices(1))
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[0], EngineFailed)
        assert is_as(engine, before)
        monkeypatch.setattr(Attached, "attaches", False)
        here.wait(1)
        here.sender.send_weights()
        check_is(engine, matrices(1), before)


class Shared(Elsewhere):
    """Both instances have one object, which the live one changes while it serves."""

    shared: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.common = self.shared


class SharedEngine(FusedEngine):
    made = Shared


def test_what_the_engine_changes_meanwhile_in_shared_objects_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What goes elsewhere is noticed then, too."""
    now = checkpoint(0)
    Shared.shared.clear()
    engine = SharedEngine.started(now)
    with followed(engine, now) as (here, source, _):
        before = state_of(engine)
        for seed in (1, 2, 3):
            Shared.shared[f"step {seed}"] = kept = object()
            source.take(now := checkpoint(seed))
            here.sender.send_weights()
            check_is(engine, now, before)
            assert Shared.shared[f"step {seed}"] is kept
        assert len(Shared.shared) == 3
        monkeypatch.setattr(Shared, "place", "another attribute")
        Shared.shared["step 4"] = None
        before = state_of(engine)
        source.take(checkpoint(4))
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        assert is_as(engine, before)


def test_no_sync_searches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results are is found at connect."""
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, _):

        def search(*args: object, **options: object) -> None:
            raise AssertionError("searched")

        for seed in (1, 2):
            source.take(now := checkpoint(seed))
            with monkeypatch.context() as patched:
                patched.setattr(Reach, "__init__", search)
                here.sender.send_weights()
            check_is(engine, now, before)


class Interrupted(Fused):
    """Is interrupted in its work, once."""

    interrupts = False

    def work(self) -> None:
        super().work()
        if type(self).interrupts:
            type(self).interrupts = False
            raise KeyboardInterrupt


class InterruptedEngine(FusedEngine):
    made = Interrupted


def test_work_that_was_interrupted_is_done_again_from_the_beginning() -> None:
    now, new = checkpoint(0), checkpoint(1)
    engine = InterruptedEngine.started(now)
    before = state_of(engine)
    target = verified(engine, now)
    layout = target.parameters()
    for number, live in target.bind(layout).items():
        live.write(0, as_bits(new[layout[number].name]).view(-1))
    Interrupted.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        target.finish()
    target.finish()
    check_is(engine, new, before)


@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
@pytest.mark.parametrize("which", [0, 1])
def test_what_was_computed_is_undone_with_the_rest(which: int) -> None:
    """In the rank that failed, and in the one that had committed."""
    first = checkpoint(0)
    engines = [FusedEngine.started(first) for _ in range(2)]
    before = [state_of(engine) for engine in engines]
    source = Weights({name: tensor.clone() for name, tensor in first.items()})
    targets = [verified(engine, first, StubbornLearnt) for engine in engines]
    with fleet(source) as here:
        ranks = [here.add(target, rank=n, world=2) for n, target in enumerate(targets)]
        here.wait(2)
        assert here.sender.send_weights().full_synced == 0
        failing = targets[which]
        assert isinstance(failing, StubbornLearnt)
        failing.fails = True
        source.take(new := checkpoint(1))
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        until(lambda: all(rank.errors for rank in ranks))
        assert not any(rank.receiver.is_dirty for rank in ranks)
        assert all(map(is_as, engines, before))
        here.wait(2)
        here.sender.send_weights()
        for engine, one in zip(engines, before, strict=True):
            check_is(engine, new, one)


def test_what_is_lost_in_sleep_is_computed_again() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, serving):
        serving.receiver.detach()
        for found in Reach([("", engine)]).tensors.values():
            as_bits(found.alias).zero_()
        source.take(now := checkpoint(1) | {n: t for n, t in now.items() if "inputs" in n})
        serving.receiver.attach()
        until(lambda: serving.receiver.state is ReceiverState.JOINING)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        check_is(engine, now, before)


def test_syncs_written_in_place_compute_too() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    source = Weights({name: tensor.clone() for name, tensor in now.items()})
    with fleet(source) as here:
        here.add(verified(engine, now), options=ReceiverOptions(max_staged_bytes=1))
        here.wait(1)
        here.sender.send_weights()
        source.take(now := checkpoint(1))
        here.sender.send_weights()
        check_is(engine, now, before)


def test_another_trainer_goes_on_with_what_is_kept() -> None:
    """One that sends other tensors, after a first one has written the engine."""
    first = checkpoint(0)
    engine, beside = FusedEngine.started(first), dict[str, Tensor]()
    before = state_of(engine)
    one = LearntTarget(engine, *learnt_of(engine, first, beside))
    one.verify_routes(first.items(), lambda: proof_of(engine))
    routes, now = one.routes(), checkpoint(1)
    with fleet(Weights(now)) as here:
        here.add(one)
        here.wait(1)
        here.sender.send_weights()
    some = {name: tensor for name, tensor in now.items() if name != "norm"}
    two = LearntTarget(engine, *learnt_of(engine, some, beside))
    two.verify_routes(
        first.items(), lambda: proof_of(engine), keep=["norm"], routes=routes, is_written=True
    )
    check_is(engine, now, before)
    source = Weights({name: tensor.clone() for name, tensor in some.items()})
    with fleet(source) as here:
        here.add(two)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        source.take({n: t for n, t in checkpoint(2).items() if n in some})
        here.sender.send_weights()
        check_is(engine, checkpoint(2) | {"norm": now["norm"]}, before)


def test_storage_of_a_result_that_is_replaced_is_noticed() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    with followed(engine, now) as (here, source, serving):
        kernel = engine.layers[1].kernel
        assert isinstance(kernel, Kernel)
        kernel.limit = kernel.limit.clone()
        before = state_of(engine)
        source.take(checkpoint(1))
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(serving.errors))
        assert "kernel.limit" in str(serving.errors[0])
        assert is_as(engine, before)


def test_workers_that_run_in_inference_mode_follow() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    source = Weights({name: tensor.clone() for name, tensor in now.items()})
    with ThreadPoolExecutor(1) as pool, torch.inference_mode(), fleet(source) as here:
        target = verified(engine, now)
        with WeightReceiver(target, here.transport.receiver()) as receiver:
            for seed in (0, 1, 2):
                source.take(now := checkpoint(seed))
                sent = pool.submit(sync, here)
                assert receiver.receive_weights(timeout_s=5) == seed + 1 or seed == 0
                sent.result(5)
                check_is(engine, now, before)


def sync(here: Fleet) -> None:
    here.wait(1)
    here.sender.send_weights(timeout_s=5)


def test_a_receiver_that_dies_between_staging_and_writing_leaves_the_old_version() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    source = Weights({name: tensor.clone() for name, tensor in now.items()})
    target = verified(engine, now)
    with ThreadPoolExecutor(1) as pool, fleet(source) as here:
        with WeightReceiver(target, here.transport.receiver()) as receiver:
            sent = pool.submit(sync, here)
            receiver.receive_weights(timeout_s=5)
            sent.result(5)
            source.take(now := checkpoint(1))
            sent = pool.submit(sync, here)
            assert receiver.stage(timeout_s=5)
        assert sent.exception(10) is not None
        assert is_as(engine, before)
        here.add(target)
        sync(here)
        check_is(engine, now, before)


class Marlin(Matrix):
    """Codes of 4 bits change places; their scales become half precision without a sign.

    The scales of vLLM's marlin_utils_fp4.py: times a power of two that all of them can bear, which
    the scale of the whole is divided by.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = fixed(torch.empty(128, 48, dtype=torch.uint8))
        self.scale = fixed(torch.empty(128, 6, dtype=FP8))
        self.whole = fixed(torch.empty(2))

    def work(self) -> None:
        self.weight = fixed(tiles_of_marlin(self.weight.data.view(torch.int32)))
        wide = self.scale.data.t().contiguous().to(torch.bfloat16)
        half = wide.to(torch.half).view(-1, 4)[:, [0, 2, 1, 3]].view(6, -1)
        factor = (448 / half.float().max()).log2().floor().exp2().clamp(min=1)
        half = (half.float() * factor).to(torch.half) * 2**7
        half[half < 2] = 0
        self.scale = fixed((half.view(torch.int16) << 1).view(FP8)[:, 1::2].contiguous())
        self.whole = fixed(1 / self.whole.data.max() * 2.0**119 / factor)


class MarlinEngine(Engine):
    made = Marlin


def packed_in_fp4(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {"norm": torch.randn(8, generator=generator).bfloat16()}
    for layer in range(3):
        for part in range(2):
            above = f"layers.{layer}.{part}"
            codes = torch.randint(0, 256, (64, 48), generator=generator, dtype=torch.uint8)
            scale = torch.rand(64, 6, generator=generator) * 2 ** (seed % 7)
            whole = torch.rand(1, generator=generator)
            found |= {f"{above}.weight": codes, f"{above}.scale": scale.to(FP8)}
            found[f"{above}.whole"] = whole
    return found


@pytest.mark.parametrize("parts", [("weight",), ("scale",), ("whole",), ("weight", "scale")])
def test_codes_that_change_places_and_scales_that_are_computed_go_together(
    parts: tuple[str, ...],
) -> None:
    now = packed_in_fp4(0)
    engine = MarlinEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, _):
        for seed in (1, 2, 3):
            new = packed_in_fp4(seed)
            now = now | {name: one for name, one in new.items() if name.endswith(parts)}
            source.take(now)
            assert here.sender.send_weights().kind == "delta"
            check_is(engine, now, before)
