"""Whatever happened before, an engine holds what a fresh one would, where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ReceiverOptions, ReloadedTarget, SenderOptions, SyncStats, WeightTarget
from deltasync.delta.bits import as_bits
from deltasync.delta.choice import Kernels
from deltasync.delta.coding import Coding
from deltasync.engines.proof.reach import Reach
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import SyncAborted
from deltasync.sync.protocol.receiver_session import ReceiverState
from tests.engines.checkpoints import Weights
from tests.sync.interpreted import INTERPRETED_S, one_kernel_at_a_time
from tests.worlds import repacking_engines as repacking
from tests.worlds import toy_engines as toy
from tests.worlds.links import (
    FailsOnce,
    Fleet,
    Model,
    Serving,
    Stubborn,
    fleet,
    until,
)

__all__ = ["one_kernel_at_a_time"]  # pytest uses it

State = dict[str, Tensor]


class StubbornRouted(FailsOnce, RoutedTarget):
    """Weights that a loader places."""


class StubbornReloaded(FailsOnce, ReloadedTarget):
    """Weights of which an engine makes something."""


class Quantised(nn.Module):
    """An engine that keeps int8 and a scale: nothing of it can be read back."""

    def __init__(self, weights: State) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_buffer(name, torch.zeros(tensor.shape, dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.zeros(()))
        self.load(weights.items())

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            rounded = tensor.bfloat16()
            scale = rounded.abs().max() / 127
            self.get_buffer(name).copy_((rounded / scale).round())
            self.get_buffer(f"{name}_scale").copy_(scale)


class Kind(NamedTuple):
    """A kind of target: fresh ranks that hold weights, targets of them, and how to draw weights.

    Attributes:
        sends: Whether kernels of the trainer compare it, too, which takes long to interpret.
        found: A tensor of the engine of which every element is checked; none if a copy is checked.
    """

    ranks: Callable[[State], list[nn.Module]]
    target: Callable[[Any, State], WeightTarget]
    draw: Callable[[int], State]
    found: str = ""
    sends: bool = False


def plain(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"a": (40, 16), "b": (16,), "c": (), "d": (0, 4)}
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def ranks_of(kind: type[toy.Rank], world: int, weights: State) -> list[nn.Module]:
    return [toy.rank_of(Model(weights), rank, world, kind) for rank in range(world)]


def of_ranks(kind: type[toy.Rank], world: int) -> Kind:
    return Kind(
        partial(ranks_of, kind, world),
        lambda engine, weights: StubbornRouted(engine, toy.CHECKPOINT),
        lambda seed: {n: p.data for n, p in toy.trainer(seed).named_parameters()},
        "o",
        sends=True,
    )


def reloaded(engine: Quantised, weights: State) -> WeightTarget:
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    target = StubbornReloaded(toy.specs(weights), engine.load, module=engine)
    target.set_loaded_weights(rounded.items())
    return target


def of_layers(made: type[toy.Layer], draw: Callable[[int], State], found: str) -> Kind:
    return Kind(
        lambda weights: [toy.of(made).started(weights)],
        lambda engine, weights: repacking.verified(engine, weights, StubbornRouted),
        draw,
        found,
    )


KINDS = {
    "module": Kind(
        lambda weights: [Model({n: t.bfloat16() for n, t in weights.items()})],
        lambda engine, weights: Stubborn(engine),
        plain,
        "a",
        sends=True,
    ),
    "routed": of_ranks(toy.Wide, 1),
    "ranks": of_ranks(toy.Rank, 2),
    "reloaded": Kind(
        lambda weights: [Quantised(weights)],
        reloaded,
        lambda seed: {n: t for n, t in plain(seed).items() if t.numel()},
    ),
    "learnt": of_layers(
        repacking.Matrix, partial(repacking.drawn, parts=repacking.MATRIX), "layers.1.weight"
    ),
    "padded": of_layers(repacking.Padded, repacking.codes, "layers.1.weight_packed"),
    "recomputed": of_layers(
        repacking.Fused, partial(repacking.drawn, parts=repacking.FUSED), "layers.1.weight"
    ),
    "codes and scales": of_layers(
        repacking.Fp4, partial(repacking.drawn, parts=repacking.FP4), "layers.1.weight"
    ),
}


def changed(old: State, new: State, share: float, part: int, seed: int) -> State:
    """A share of the elements, or of the bytes of packed codes, becomes that of others.

    Of all tensors if `part` is 0, otherwise of those with one of the names in the layers.
    """
    generator = torch.Generator().manual_seed(seed)
    suffixes = ["", *sorted({name.rpartition(".")[2] for name in old})]
    found = {name: tensor.clone() for name, tensor in old.items()}
    for name, tensor in found.items():
        if name.endswith(suffixes[part % len(suffixes)]) and tensor.numel():
            is_packed = tensor.dtype == torch.int32
            here, there = (
                one.view(torch.uint8) if is_packed else one for one in (tensor, new[name])
            )
            mask = torch.rand(here.shape, generator=generator) < share
            as_bits(here)[mask] = as_bits(there)[mask]
    return found


class History:
    """A trainer, and an engine of one or more ranks that follows it."""

    def __init__(
        self, kind: Kind, here: Fleet, source: Weights, engines: list[nn.Module], targets: list[Any]
    ) -> None:
        self.kind, self.here, self.source = kind, here, source
        self.engines, self.targets, self.is_staged = engines, targets, False
        self.before = list(map(toy.state_of, engines))

    def sync(self) -> SyncStats:
        self.here.wait(len(self.engines))
        stats = self.here.sender.send_weights(timeout_s=INTERPRETED_S)
        assert stats.receivers == len(self.engines)
        # In the order in which the engine was loaded: the last part's shape stays.
        fresh = self.kind.ranks(dict(reversed(self.source.weights.items())))
        for engine, other, before in zip(self.engines, fresh, self.before, strict=True):
            toy.check_state(engine, toy.state_of(other), before)
        return stats

    def change(self) -> None:
        assert self.sync().full_synced == 0

    def fail(self) -> None:
        """In the pause, after all was written, in the last rank."""
        states = list(map(toy.state_of, self.engines))
        self.targets[-1].fails = True
        with pytest.raises(SyncAborted, match="planted"):
            self.here.sender.send_weights()
        until(lambda: all(one.errors for one in self.servings))
        for serving, engine, state in zip(self.servings, self.engines, states, strict=True):
            assert serving.receiver.is_dirty or toy.is_as(engine, state)
            assert not (serving.receiver.is_dirty and self.is_staged)
        self.sync()

    def sleep(self) -> None:
        """Everything is lost."""
        for serving, engine in zip(self.servings, self.engines, strict=True):
            serving.receiver.detach()
            for path, found in Reach([("", engine)]).tensors.items():
                if not path.endswith("weight_shape"):  # which no sync writes
                    as_bits(found.alias).zero_()
            serving.receiver.attach()
        until(lambda: all(s.receiver.state is ReceiverState.JOINING for s in self.servings))
        assert self.sync().full_synced == len(self.engines)

    def corrupt(self) -> None:
        """One bit, of what no sync writes: the scrub of the next one finds it."""
        as_bits(self.engines[0].get_parameter(self.kind.found).data)[1, 1] ^= 1
        with suppress(SyncAborted):  # if it has left between the two
            self.here.sender.send_weights()
        until(lambda: bool(self.servings[0].errors))
        assert self.kind.found.split(".")[0] in str(self.servings[0].errors)
        self.sync()

    @property
    def servings(self) -> list[Serving]:
        return list(self.here.serving.values())


Event = tuple[str, float, int]
EVENTS: st.SearchStrategy[Event] = st.tuples(
    st.sampled_from(["change", "change", "fail", "sleep", "corrupt"]),
    st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    st.integers(0, 4),
)


EXAMPLE: dict[str, Any] = {
    "seed": 0,
    "events": [("change", 0.05, 0), ("fail", 0.6, 0), ("sleep", 1.0, 1), ("corrupt", 0.05, 0)],
    "compression": "none",
    "size": 1 << 20,
}


@pytest.mark.promise("Bits", "An engine holds what its own loader would load.")
@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(
    is_staged=st.booleans(),
    seed=st.integers(0, 99),
    is_same=st.booleans(),
    events=st.lists(EVENTS, max_size=3),
    compression=st.sampled_from(["none", "zstd", "gap"]),
    size=st.sampled_from([300, 1 << 20]),
)
@example(is_staged=True, is_same=False, **EXAMPLE)
@example(is_staged=False, is_same=True, **EXAMPLE)
def test_any_history_leaves_what_a_fresh_engine_would_hold(kind: str, **options: Any) -> None:
    played(kind, **options)


@pytest.mark.timeout(2 * INTERPRETED_S)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_leave_what_a_fresh_engine_would_hold(kind: str) -> None:
    """One sync, see `INTERPRETED_S`."""
    options = EXAMPLE | {"events": [("change", 0.6, 0)]}
    played(kind, is_staged=True, is_same=True, kernels="triton", **options)


def played(
    kind: str,
    *,
    is_staged: bool,
    seed: int,
    is_same: bool,
    events: list[Event],
    compression: Coding,
    size: int,
    kernels: Kernels = "torch",
) -> None:
    """A history, and what the engine holds after each event."""
    made = KINDS[kind]
    first = made.draw(seed)
    started = first if is_same else made.draw(seed + 1)
    engines = made.ranks(started)
    targets = [made.target(engine, started) for engine in engines]
    # In another order than the engine's.
    source = Weights({name: tensor.clone() for name, tensor in reversed(first.items())})
    sending = SenderOptions(
        bucket_bytes=size,
        compression=compression,
        kernels=kernels if made.sends else "torch",
    )
    with fleet(source, options=sending) as here:
        options = ReceiverOptions(
            max_staged_bytes=None if is_staged else 0,
            kernels=kernels,
            scrub_every=1,
            stall_timeout_s=INTERPRETED_S,
        )
        for number, target in enumerate(targets):
            here.add(target, rank=number, world=len(engines), options=options)
        history = History(made, here, source, engines, targets)
        history.is_staged = is_staged
        assert history.sync().full_synced == (0 if is_same else len(engines))
        for number, (event, share, part) in enumerate(events):
            if event in ("sleep", "corrupt") and not made.found:  # it checks a copy
                continue
            if event != "change":  # something has changed then
                share, part = max(share, 0.05), 0
            new = made.draw(seed + number + 2)
            new = changed(source.weights, new, share, part, number)
            if event == "corrupt":
                layer = made.found.rpartition(".")[0] or made.found
                new = {name: one for name, one in new.items() if not name.startswith(layer)}
            source.take(new)
            for serving in history.servings:
                serving.errors.clear()
            getattr(history, event)()
