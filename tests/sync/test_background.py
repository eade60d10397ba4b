"""Syncing while training goes on: what is sent is the weights of one step, whatever comes after."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync import DeltaSyncError, ModuleSource, SenderOptions, WeightSender, sync_after_step
from deltasync.errors import PeerLost, SourceChanged, StepApplied, SyncAborted
from deltasync.transports import inprocess
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import decode
from tests.worlds.links import Model, Receivers, ThroughReceiver, bits_equal, random_model, until
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


def test_nothing_is_captured_once_the_weights_may_have_changed(opened: Open) -> None:
    """The only member fails after the decision, and a newcomer waits."""
    training, newcomer = opened("wait", kind="commit"), random_model(SHAPES, 2).bfloat16()
    training.receivers.add(newcomer, engine="newcomer")
    training.receivers.wait(2)
    training.gate.is_open.clear()
    training.gate.breaks = True
    training.step()
    assert training.gate.reached.wait(60)
    training.model.get_parameter("first").data += 1  # the next step is half way
    training.gate.is_open.set()
    training.hook.wait()
    assert isinstance(training.hook.last_error, SyncAborted)
    assert bits_equal(newcomer, random_model(SHAPES, 2).bfloat16())
    training.receivers.wait(2)
    training.step()
    assert training.holds(-1)
    assert training.holds(-1, newcomer)


def train(trainer: Split, where: str, number: int) -> None:
    """One rank, of which the second one fails at its third step."""
    source, told = trainer.sources[number], list[object]()
    kinds = {"source": SourceChanged("planted"), "memory": MemoryError("planted")}
    held = [t.requires_grad_() for t in source.held.values() if t.numel()]
    optimizer = torch.optim.SGD(held, lr=1.0)

    def callback(outcome: object) -> None:
        told.append(outcome)
        if (number, where, len(told)) == (1, "callback", 2):
            raise ZeroDivisionError

    hook = sync_after_step(
        optimizer, trainer.ranks[number], on_busy="wait", callback=callback, timeout_s=60
    )
    for step in range(6):
        source.fails = kinds.get(where) if (number, step) == (1, 2) else None
        for parameter in held:
            parameter.grad = torch.full_like(parameter, -1.0)
        with suppress(StepApplied, ZeroDivisionError):
            optimizer.step()
    with suppress(StepApplied, ZeroDivisionError):
        hook.wait()
    hook.remove()


@pytest.mark.parametrize("where", ["source", "memory", "callback"])
def test_ranks_count_the_same_calls_whatever_one_of_them_raises(where: str) -> None:
    """A rank that left one out would send the weights of another step than the others."""
    model, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        trainer.add(replica)
        trainer.wait(1)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(partial(train, trainer, where), range(2)))
        for name, tensor in replica.named_parameters():
            parts = [source.held[name].detach() for source in trainer.sources]
            assert torch.equal(tensor, torch.cat(parts))


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
                    for weights in training.model.parameters():  # others than were looked up
                        weights.data = weights.data.clone()
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
