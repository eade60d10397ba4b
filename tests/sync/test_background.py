"""Syncing while training goes on: what is sent is the weights of one step, whatever comes after."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync import (
    DeltaSyncError,
    ModuleSource,
    NamedTensor,
    SenderOptions,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import PeerLost, SourceChanged, StepApplied, SyncAborted
from deltasync.transports import inprocess
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import decode
from tests.worlds.links import (
    Model,
    Receivers,
    ThroughReceiver,
    bits_equal,
    fleet,
    random_model,
    until,
)
from tests.worlds.programs import run
from tests.worlds.trainers import Split, rows_of, trainer_of

SHAPES = {"first": (40, 30), "second": (700,)}
Busy = Literal["wait", "skip"] | None


class Gate(ThroughReceiver):
    """A link that holds back messages of one kind while it is closed."""

    def __init__(self, inner: ReceiveTransport, kind: str) -> None:
        super().__init__(inner)
        self.kind, self.is_open, self.reached = kind, threading.Event(), threading.Event()
        self.is_open.set()
        self.breaks = False

    def receive(self, *, timeout_s: float) -> Frame:
        frame = super().receive(timeout_s=timeout_s)
        if decode(frame.header)[0].kind == self.kind:
            self.reached.set()
            assert self.is_open.wait(60)
            if self.breaks:
                self.breaks = False
                raise PeerLost("planted")
        return frame


def gated(receivers: Receivers, replica: Model, engine: str, kind: str) -> Gate:
    """The gate of a receiver that joins."""
    made: list[Gate] = []

    def wrap(transport: ReceiveTransport) -> Gate:
        made.append(Gate(transport, kind))
        return made[-1]

    receivers.add(replica, engine=engine, wrap=wrap)
    return made[0]


class Training:
    """A model that learns, a replica behind a gate, and the weights after each step.

    Attributes:
        callback: What the hook calls.
    """

    def __init__(
        self,
        on_busy: Busy,
        *,
        kind: str = "prepare",
        device: str = "cpu",
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        self.model = random_model(SHAPES, 0).requires_grad_(True).to(device)
        self.replica = random_model(SHAPES, 1).bfloat16().to(device)
        link = inprocess.Sender(device=device) if device == "cuda" else inprocess.Sender()
        self.receivers = Receivers([link])
        self.sender = self.receivers.sender = WeightSender(
            ModuleSource(self.model), link, options=SenderOptions(bucket_bytes=1 << 12)
        )
        self.gate = gated(self.receivers, self.replica, "engine", kind)
        self.receivers.wait(1)
        self.optimizers = [torch.optim.AdamW([p], lr=0.01) for p in self.model.parameters()]
        self.callback: Callable[[object], object] = lambda stats: None
        self.hook = sync_after_step(
            self.optimizers,
            self.sender,
            on_busy=on_busy,
            timeout_s=timeout_s,
            callback=self._called_back,
            **options,
        )
        self.after: list[dict[str, Tensor]] = []

    def _called_back(self, stats: object) -> None:
        self.callback(stats)

    def step(self) -> None:
        torch.manual_seed(len(self.after))
        for parameter, optimizer in zip(self.model.parameters(), self.optimizers, strict=True):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        self.after.append(self.held())

    def held(self) -> dict[str, Tensor]:
        return {name: p.detach().bfloat16().clone() for name, p in self.model.named_parameters()}

    def holds(self, step: int, replica: Model | None = None) -> bool:
        """Whether the replica has the weights that the model had after a step."""
        return bits_equal(replica or self.replica, Model(self.after[step]))

    def is_sent(self) -> bool:
        """Whether the replica has the last weights, if need be by another sync."""
        with suppress(DeltaSyncError):
            self.hook.wait()
            self.sender.send_weights(timeout_s=60)
        return self.holds(-1)

    @contextmanager
    def blocked_step(self) -> Iterator[None]:
        """The next step, which waits for what this context does."""
        with ThreadPoolExecutor(1) as thread:
            step = thread.submit(self.step)
            assert wait([step], 0.2).not_done
            yield
            step.result(60)

    def close(self) -> None:
        self.gate.is_open.set()
        self.hook.remove()
        self.receivers.close()


def held_back(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """(reached, go on): payloads are not sent before the second is set."""
    reached, go_on = threading.Event(), threading.Event()
    send = inprocess.Sender.send

    def later(link: inprocess.Sender, frame: Frame, *, timeout_s: float) -> None:
        if frame.payload is not None:
            reached.set()
            assert go_on.wait(60)
        send(link, frame, timeout_s=timeout_s)

    monkeypatch.setattr(inprocess.Sender, "send", later)
    return reached, go_on


Open = Callable[..., Training]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes a Training that has done one step, with its sync; it is closed after the test."""
    with ExitStack() as stack:

        def make(*args: Any, **settings: Any) -> Training:
            training = Training(*args, **settings)
            stack.callback(training.close)
            training.step()
            assert training.holds(0)
            return training

        yield make


@pytest.mark.parametrize("kind", ["prepare", "commit"])
def test_steps_go_on_while_receivers_stage_and_skipped_syncs_lose_nothing(
    opened: Open, kind: str
) -> None:
    """Of two receivers, one fails: the other takes what was read before the weights moved on."""
    training = opened("skip", kind=kind)
    failing = gated(training.receivers, random_model(SHAPES, 2).bfloat16(), "other", kind)
    training.sender.wait_for_receivers(2, timeout_s=60)
    training.sender.send_weights(timeout_s=60)
    failing.breaks = True
    training.gate.is_open.clear()
    for _ in range(3):
        training.step()
    assert training.gate.reached.wait(60)
    assert training.holds(0)
    training.gate.is_open.set()
    training.hook.wait()
    assert training.holds(1)
    assert training.hook.last_stats is not None
    assert set(training.hook.last_stats.lost) == {"other[0/1]"}
    assert (training.hook.syncs, training.hook.skipped) == (2, 2)
    training.step()
    training.hook.wait()
    assert training.holds(4)
    assert (training.hook.syncs, training.hook.failures) == (3, 0)


@pytest.mark.promise("Cost", "With `on_busy`, a step waits only until the weights have been read.")
@pytest.mark.parametrize("on_busy", ["skip", "wait"])
def test_the_optimizer_waits_until_the_weights_have_been_read(
    opened: Open, monkeypatch: pytest.MonkeyPatch, on_busy: Busy
) -> None:
    """Each of several optimizers; and a sync that is due waits for the one before, if asked to."""
    training = opened(on_busy)
    with monkeypatch.context() as patched:
        reading, go_on = held_back(patched)
        training.step()
        assert reading.wait(60)
        with training.blocked_step():
            assert all(map(torch.equal, training.held().values(), training.after[1].values()))
            go_on.set()
        training.hook.wait()
    training.gate.is_open.clear()
    training.step()
    if on_busy == "wait":
        with training.blocked_step():
            assert training.gate.reached.wait(60)
            training.gate.is_open.set()
    training.gate.is_open.set()
    training.hook.wait()
    training.step()
    training.hook.wait()
    assert training.holds(-1)


def test_what_a_sync_raised_a_later_step_raises(opened: Open) -> None:
    training = opened("wait", on_error="raise")
    training.receivers.serving.pop("engine/0").stop()
    training.step()
    with pytest.raises(StepApplied, match="disconnected"):
        training.step()
    assert training.hook.failures == 2  # this step's own sync was tried all the same


@pytest.mark.parametrize("call", ["wait", "step"])
def test_waiting_in_the_callback_of_a_background_sync_is_refused(opened: Open, call: str) -> None:
    training = opened("wait")
    raised: list[DeltaSyncError] = []

    def callback(_: object) -> None:
        try:
            training.hook.wait() if call == "wait" else training.optimizers[0].step()
        except DeltaSyncError as error:
            raised.append(error)

    training.callback = callback
    training.step()
    until(lambda: bool(raised))
    training.callback = lambda _: None
    training.hook.wait()
    assert ["callback" in str(error) for error in raised] == [True]


def test_nothing_is_captured_once_the_weights_may_have_changed() -> None:
    """The only member fails after the decision, and a newcomer waits."""
    model, replicas = random_model(SHAPES, 0), [random_model(SHAPES, n) for n in (1, 2)]
    looked: list[str] = []

    class Source(ModuleSource):
        def tensors(self) -> list[NamedTensor]:
            looked.append(threading.current_thread().name)
            return super().tensors()

    with fleet(Source(model)) as here:
        gate = gated(here, replicas[0], "first", "commit")
        here.wait(1)
        here.sender.send_weights(timeout_s=60)
        here.add(replicas[1], engine="second")
        here.wait(2)
        gate.is_open.clear()
        gate.breaks = True
        for weights in model.parameters():
            weights.data += 1
        released = threading.Event()
        here.sender.refresh_source()
        looked.clear()
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(
                here.sender.send_weights, timeout_s=60, on_source_read=released.set
            )
            assert gate.reached.wait(60)
            assert released.wait(60)
            next(model.parameters()).data += 1  # the optimizer is half way
            gate.is_open.set()
            assert isinstance(call.exception(60), SyncAborted)
        assert not looked
        here.wait(2)
        here.sender.send_weights(timeout_s=60)
        assert all(bits_equal(model, replica) for replica in replicas)


def test_a_step_within_atexit_syncs_in_the_step() -> None:
    """No thread can begin there any more."""
    code = """
import atexit, torch
from deltasync import sync_after_step
from tests.worlds.links import Fleet, bits_equal, random_model
model, replica = (random_model({"w": (8,)}, seed).requires_grad_(True) for seed in (0, 1))
here = Fleet(model)
here.join(replica)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
hook = sync_after_step(optimizer, here.sender, on_busy="wait", on_error="raise")
def step():
    model.w.grad = torch.ones(8)
    optimizer.step()
step()
step()
hook.wait()
def last():
    step()
    assert hook.syncs == 3, hook.last_error
    assert bits_equal(model, replica)
    here.close()  # Python aborts where a daemon thread is within torch at the end
    print("synced")
atexit.register(last)
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "synced\n"), done.stderr


class Rank:
    """A rank that trains with a hook; `fails` at its third step."""

    def __init__(self, trainer: Split, number: int, fails: str) -> None:
        self._source, self._fails, self._told = trainer.sources[number], fails, 0
        self._held = [t.requires_grad_() for t in self._source.held.values() if t.numel()]
        self._optimizer = torch.optim.SGD(self._held, lr=1.0)
        self.hook = sync_after_step(
            self._optimizer,
            trainer.ranks[number],
            on_busy="wait",
            callback=self._callback,
            timeout_s=60,
        )

    def _callback(self, _: object) -> None:
        self._told += 1
        if self._fails == "callback" and self._told == 2:
            raise ZeroDivisionError

    def train(self) -> None:
        kinds = {"source": SourceChanged("planted"), "memory": MemoryError("planted")}
        for number in range(6):
            self._source.fails = kinds.get(self._fails) if number == 2 else None
            for parameter in self._held:
                parameter.grad = torch.full_like(parameter, -1.0)
            with suppress(StepApplied, ZeroDivisionError):
                self._optimizer.step()
        with suppress(StepApplied, ZeroDivisionError):
            self.hook.wait()


@pytest.mark.parametrize("where", ["source", "memory", "callback"])
def test_ranks_count_the_same_calls_whatever_one_of_them_raises(where: str) -> None:
    """A rank that left one out would send the weights of another step than the others."""
    model, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        trainer.add(replica)
        trainer.wait(1)
        ranks = [Rank(trainer, 0, ""), Rank(trainer, 1, where)]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Rank.train, ranks))
        for name, tensor in replica.named_parameters():
            parts = [source.held[name].detach() for source in trainer.sources]
            assert torch.equal(tensor, torch.cat(parts))
        for rank in ranks:
            rank.hook.remove()


def test_an_interrupted_wait_lets_no_optimizer_step(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened("wait")
    reading, go_on = held_back(monkeypatch)
    training.step()
    assert reading.wait(60)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            training.hook.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    threading.Timer(0.3, go_on.set).start()
    was: list[bool] = []
    training.optimizers[0].register_step_pre_hook(lambda *_: was.append(go_on.is_set()))
    training.step()
    assert was == [True]


def test_what_was_looked_up_for_a_call_that_came_to_nothing_is_looked_up_again() -> None:
    model, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        trainer.add(replica)
        trainer.wait(1)
        trainer.send()
        trainer.sender.refresh_source()
        for rank in trainer.ranks:  # one after the other
            with pytest.raises(SyncAborted):
                rank.send_weights(timeout_s=0.2, on_source_read=lambda: None)
        for weights in trainer.module.parameters():
            weights.data += 1
        for source in trainer.sources:  # storage is replaced
            source.held = {name: tensor.clone() for name, tensor in source.held.items()}
        trainer.step()
        trainer.settle(1)
        assert bits_equal(trainer.module, replica)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(["step", "close", "open", "break"]), max_size=14))
def test_any_history_leaves_receivers_at_a_step_of_their_trainer(actions: list[str]) -> None:
    training = Training("skip", timeout_s=1.0)  # which some gates let pass
    try:
        for action in ["step", *actions]:
            match action:
                case "step":
                    training.step()
                case "close":
                    training.gate.is_open.clear()
                case "open":
                    training.gate.is_open.set()
                    training.hook.wait()
                    assert any(training.holds(n) for n in range(len(training.after)))
                case "break":
                    training.gate.breaks = True
        training.gate.is_open.set()
        training.hook.wait()
        training.sender.wait_for_receivers(1, timeout_s=60)
        training.step()
        until(training.is_sent)
    finally:
        training.close()


@pytest.mark.gpu
def test_on_gpus_a_step_comes_after_what_was_read(opened: Open) -> None:
    training = opened("skip", device="cuda")
    for _ in range(30):
        training.step()
        if training.hook.skipped % 3:
            training.hook.wait()
            assert any(training.holds(n) for n in range(len(training.after)))
    training.hook.wait()
    training.step()
    training.hook.wait()
    assert training.holds(-1)
