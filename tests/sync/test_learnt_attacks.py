"""Engines that compute at some values alone; receivers that are interrupted while they write."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import deltasync
from deltasync import ReceiverOptions, WeightReceiver
from deltasync.engines.proof.reach import Reach
from deltasync.errors import DeltaSyncError, SyncAborted
from tests.engines.checkpoints import Weights
from tests.sync.test_learnt import Engine, Matrix
from tests.sync.test_learnt import checkpoint as matrices
from tests.sync.test_recomputed import (
    Fused,
    FusedEngine,
    State,
    check_is,
    checkpoint,
    fixed,
    followed,
    is_as,
    state_of,
    verified,
)
from tests.worlds.links import Fleet, fleet

_ROOT = str(Path(deltasync.__file__).parent)


def reordered(weights: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    """Scales first, so that their numbers are the smallest, and all of one value."""
    ahead = sorted(weights, key=lambda name: not name.endswith("scale"))
    return {
        n: torch.full_like(weights[n], value) if n.endswith("scale") else weights[n] for n in ahead
    }


class AtMost(Matrix):
    """Its scales are clamped, which those at the start do not need."""

    def work(self) -> None:
        self.weight = fixed(self.weight.data.t().contiguous())
        self.scale = fixed(self.scale.data.clamp(max=1).t().contiguous())


class Ones(Matrix):
    """Scales of 1 mean something else."""

    def work(self) -> None:
        self.weight = fixed(self.weight.data.t().contiguous())
        self.scale = fixed(torch.where(self.scale.data == 1, 0.25, self.scale.data))


class Beyond(Matrix):
    """Keeps something of its scales that differs for large ones alone."""

    def work(self) -> None:
        self.weight = fixed(self.weight.data.t().contiguous())
        self.limit = fixed(self.scale.data.max().clamp(min=1000.0))


@pytest.mark.parametrize("made", [AtMost, Ones, Beyond])
def test_what_is_computed_at_some_values_alone_follows(made: type[Matrix]) -> None:
    class Kind(Engine):
        pass

    Kind.made = made
    now = reordered(matrices(0), 0.5)
    engine = Kind.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, _):
        for value in (2.0, 1.0, 5000.0, 0.0, 3e38):
            source.take(now := reordered(matrices(0), value))
            here.sender.send_weights()
            check_is(engine, now, before)


class Interrupt:
    """Raises KeyboardInterrupt at a line after the first write, in a thread that it traces."""

    def __init__(self, line: int) -> None:
        self._left, self._is_writing, self.is_raised = line, False, False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if self.is_raised or not code.co_filename.startswith(_ROOT):
            return None
        self._is_writing |= code.co_name == "_writing"
        if self._is_writing and event == "line":
            self._left -= 1
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            if self._left <= 0 and not text.startswith("with "):  # no signal comes at its end
                self.is_raised = True
                raise KeyboardInterrupt
        return self


def received(
    here: Fleet, receiver: WeightReceiver, interrupt: Interrupt | None = None
) -> list[BaseException]:
    """What a sync and its receiver raise."""
    errors: list[BaseException] = []

    def run() -> None:
        sys.settrace(interrupt)
        try:
            receiver.receive_weights(timeout_s=20)
        except (KeyboardInterrupt, DeltaSyncError) as error:
            errors.append(error)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        here.wait(1)
        here.sender.send_weights(timeout_s=20)
    except DeltaSyncError as error:
        errors.append(error)
    thread.join(30)
    assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("is_staged", [True, False])
def test_a_receiver_that_is_interrupted_at_any_line_serves_no_mixture_and_heals(
    is_staged: bool,
) -> None:
    """Between the first write and the commit, the engine's own work among it."""
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before, target = state_of(engine), verified(engine, now)
    source = Weights({name: tensor.clone() for name, tensor in now.items()})
    options = ReceiverOptions(max_staged_bytes=None if is_staged else 1)
    with fleet(source) as here:
        receiver = WeightReceiver(target, here.transport.receiver(), options=options)
        interrupt, line = Interrupt(0), 1
        for seed in range(1, 100):
            for _ in range(2):  # the first one may only find that its connection was lost
                if not received(here, receiver):
                    break
            check_is(engine, now, before)
            assert not receiver.is_dirty
            old: State = state_of(engine)
            source.take(now := checkpoint(seed))
            interrupt = Interrupt(line)
            received(here, receiver, interrupt)
            if not interrupt.is_raised:
                break
            if not (receiver.is_dirty or is_as(engine, old)):
                check_is(engine, now, before)  # all was written and read back before
            line += 499
        assert not interrupt.is_raised
        assert seed > 10
        check_is(engine, now, before)


def test_many_syncs_keep_neither_memory_nor_addresses() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before, counts = state_of(engine), []
    with followed(engine, now) as (here, source, _):
        for seed in range(1, 201):
            new = checkpoint(seed)
            part = ("weight", "scale", "whole", "inputs", "")[seed % 5]
            now = now | {name: one for name, one in new.items() if name.endswith(part)}
            source.take(now)
            here.sender.send_weights()
            if seed in (50, 200):
                check_is(engine, now, before)
                gc.collect()
                counts.append(sum(type(one) in (Tensor, Reach) for one in gc.get_objects()))
    assert counts[1] <= counts[0] + 20


def test_a_full_sync_after_an_abort_computes_all() -> None:
    """The abort comes from the sender's side, in a sync of which all was staged."""
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    before = state_of(engine)
    with followed(engine, now) as (here, source, serving):
        source.take(checkpoint(1))
        kernel = engine.layers[0].get_parameter("whole")
        kernel.data.fill_(7.0)  # somebody else wrote a result
        serving.receiver.invalidate()
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=0.001)
        source.take(now := checkpoint(2))
        here.wait(1)
        here.sender.send_weights()
        check_is(engine, now, before)


class Peers(Matrix):
    """At one value its work replaces something of all instances, which their class knows."""

    instances: ClassVar[list[Peers]] = []
    replaced = ""

    def __init__(self) -> None:
        super().__init__()
        self.instances.append(self)

    def work(self) -> None:
        self.weight = fixed(self.weight.data.t().contiguous())
        self.limit = fixed(self.scale.data.max().clamp(min=1000.0))
        for peer in self.instances if self.scale.data.max() == 5000 else ():
            if peer is not self and hasattr(peer, "limit"):
                there = getattr(peer, self.replaced)
                setattr(peer, self.replaced, fixed(there.detach().clone()))


@pytest.mark.parametrize("replaced", ["weight", "limit"])
def test_work_that_reaches_the_live_engine_through_its_class_fails_the_sync(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kind(Engine):
        made = Peers

    monkeypatch.setattr(Peers, "instances", [])
    monkeypatch.setattr(Peers, "replaced", replaced)
    now = reordered(matrices(0), 0.5)
    with followed(Kind.started(now), now) as (here, source, serving):
        name = "layers.0.0.scale"
        source.take(now | {name: torch.full_like(now[name], 5000.0)})
        with pytest.raises(SyncAborted, match=r"storage of .* was replaced"):
            here.sender.send_weights()
        assert serving.receiver.is_dirty


def test_a_result_that_was_replaced_is_refused_by_name_when_the_receiver_rejoins() -> None:
    now = checkpoint(0)
    engine = FusedEngine.started(now)
    with followed(engine, now) as (here, source, serving):
        fused = engine.layers[1]
        assert isinstance(fused, Fused)
        fused.alpha = fixed(torch.zeros_like(fused.alpha.data))
        serving.receiver.invalidate()
        source.take(now | {"norm": checkpoint(1)["norm"]})
        for _ in range(2):  # the first one may only find that the connection was lost
            here.wait(1)
            with pytest.raises(SyncAborted):
                here.sender.send_weights(timeout_s=5)
        assert any("has replaced 'layers.1.alpha'" in str(error) for error in serving.errors)
