"""Syncing while training goes on: what is sent is the weights of one step, whatever comes after."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
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
    SyncStats,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import ConfigError, PeerLost, SourceChanged, StepApplied, SyncAborted
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.hook import StepHook
from deltasync.transports import inprocess
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import decode
from tests.cli.command import hearing_signals
from tests.worlds.links import (
    Fleet,
    Model,
    Receivers,
    ThroughReceiver,
    bits_equal,
    fleet,
    random_model,
    until,
)
from tests.worlds.programs import run

SHAPES = {"first": (40, 30), "second": (700,)}


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
            assert self.is_open.wait(30)
            if self.breaks:
                self.breaks = False
                raise PeerLost("planted")
        return frame


class Training:
    """A model that learns, a replica behind a gate, and the weights after each step."""

    def __init__(
        self,
        on_busy: Literal["wait", "skip"] | None,
        *,
        kind: str = "prepare",
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.model = random_model(SHAPES, 0).requires_grad_(True).to(device)
        self.replica = random_model(SHAPES, 1).bfloat16().to(device)
        link = inprocess.Sender(device=device) if device == "cuda" else inprocess.Sender()
        self.receivers = Receivers([link])
        self.sender = self.receivers.sender = WeightSender(
            ModuleSource(self.model), link, options=SenderOptions(bucket_bytes=1 << 12)
        )
        self.gates: list[Gate] = []
        self.kind = kind
        self.join(self.replica, "engine")
        self.receivers.wait(1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.hook = sync_after_step(
            self.optimizer, self.sender, on_busy=on_busy, timeout_s=20, **options
        )
        self.after: list[dict[str, Tensor]] = []

    def join(self, replica: Model, engine: str) -> Gate:
        made: list[Gate] = []

        def wrap(transport: ReceiveTransport) -> Gate:
            made.append(Gate(transport, self.kind))
            return made[-1]

        self.receivers.add(replica, engine=engine, wrap=wrap)
        self.gates += made
        return made[0]

    def step(self) -> None:
        torch.manual_seed(len(self.after))
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        held = {name: p.detach().bfloat16().clone() for name, p in self.model.named_parameters()}
        self.after.append(held)

    def holds(self, step: int, replica: Model | None = None) -> bool:
        """Whether the replica has the weights that the model had after a step."""
        return bits_equal(replica or self.replica, Model(self.after[step]))

    def close(self) -> None:
        for gate in self.gates:
            gate.is_open.set()
        self.hook.remove()
        self.receivers.close()


def held_back(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """(reached, go on): payloads are not sent before the second is set."""
    reached, go_on = threading.Event(), threading.Event()
    send = inprocess.Sender.send

    def later(link: inprocess.Sender, frame: Frame, *, timeout_s: float) -> None:
        if frame.payload is not None:
            reached.set()
            assert go_on.wait(20)
        send(link, frame, timeout_s=timeout_s)

    monkeypatch.setattr(inprocess.Sender, "send", later)
    return reached, go_on


Open = Callable[..., Training]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes a Training, which is closed after the test."""
    with ExitStack() as stack:

        def make(*args: Any, **settings: Any) -> Training:
            training = Training(*args, **settings)
            stack.callback(training.close)
            return training

        yield make


@pytest.mark.parametrize("kind", ["prepare", "commit"])
def test_steps_go_on_while_receivers_stage_and_skipped_syncs_lose_nothing(
    opened: Open, kind: str
) -> None:
    training = opened("skip", kind=kind)
    [gate] = training.gates
    training.step()  # the first sync is done in the step
    assert training.holds(0)
    gate.is_open.clear()
    for _ in range(3):
        training.step()
    assert gate.reached.wait(20)
    assert training.holds(0)
    gate.is_open.set()
    training.hook.wait()
    assert training.holds(1)
    assert (training.hook.syncs, training.hook.skipped) == (2, 2)
    training.step()
    training.hook.wait()
    assert training.holds(4)
    assert (training.hook.syncs, training.hook.failures) == (3, 0)


def test_a_sync_that_is_due_waits_for_the_one_before(opened: Open) -> None:
    training = opened("wait")
    [gate] = training.gates
    training.step()
    gate.is_open.clear()
    training.step()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(training.step)  # the third
        assert gate.reached.wait(20)
        assert wait([step], 0.2).not_done
        assert training.holds(0)
        gate.is_open.set()
        step.result(20)
    training.hook.wait()
    assert training.holds(2)
    assert (training.hook.syncs, training.hook.skipped) == (3, 0)


@pytest.mark.promise("Cost", "With `on_busy`, a step waits only until the weights have been read.")
def test_the_optimizer_waits_until_the_weights_have_been_read(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened("skip")
    training.step()
    reading, go_on = held_back(monkeypatch)
    training.step()
    assert reading.wait(20)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(training.step)
        assert wait([step], 0.2).not_done
        assert all(
            torch.equal(p.bfloat16(), training.after[1][name])
            for name, p in training.model.named_parameters()
        )
        go_on.set()
        step.result(20)
    training.hook.wait()
    training.step()
    training.hook.wait()
    assert training.holds(3)


def test_a_receiver_that_fails_leaves_the_others_at_one_step(opened: Open) -> None:
    """The weights have moved on: the others take what was read before."""
    training = opened("skip")
    other = random_model(SHAPES, 2).bfloat16()
    failing = training.join(other, "other")
    training.sender.wait_for_receivers(2, timeout_s=10)
    training.step()
    assert training.holds(0)
    assert training.holds(0, other)
    failing.breaks = True
    failing.is_open.clear()
    training.step()
    training.step()
    failing.is_open.set()
    training.hook.wait()
    assert training.hook.last_stats is not None
    assert set(training.hook.last_stats.lost) == {"other[0/1]"}
    assert training.holds(1)
    training.step()
    training.hook.wait()
    assert training.holds(3)
    assert (training.hook.failures, training.hook.skipped, training.hook.syncs) == (0, 1, 3)


def test_what_a_sync_raised_a_later_step_raises(opened: Open) -> None:
    training = opened("wait", on_error="raise")
    training.step()
    training.receivers.serving.pop("engine/0").stop()
    training.step()
    with pytest.raises(StepApplied, match="disconnected"):
        training.step()
    assert training.hook.failures == 2  # this step's own sync was tried all the same


def test_what_fails_before_a_sync_has_begun_is_counted(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened("wait")
    training.step()

    def fails(_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(ModuleSource, "tensors", fails)
    with pytest.raises(StepApplied, match="planted"):
        training.step()
    assert training.hook.failures == 1


def test_an_interrupted_wait_lets_no_optimizer_step(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened("wait")
    training.step()
    reading, go_on = held_back(monkeypatch)
    training.step()
    assert reading.wait(20)
    with hearing_signals():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            training.hook.wait()
    threading.Timer(0.3, go_on.set).start()
    was: list[bool] = []
    training.optimizer.register_step_pre_hook(lambda *_: was.append(go_on.is_set()))
    training.step()
    assert was == [True]


def test_nothing_is_captured_once_the_weights_may_have_changed() -> None:
    """The only member fails after the decision, and a newcomer waits."""
    model, replicas = random_model(SHAPES, 0), [random_model(SHAPES, n) for n in (1, 2)]
    gates: list[Gate] = []

    def wrap(transport: ReceiveTransport) -> Gate:
        gates.append(Gate(transport, "commit"))
        return gates[-1]

    with fleet(model) as here:
        here.add(replicas[0], engine="first", wrap=wrap)
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        here.add(replicas[1], engine="second")
        here.wait(2)
        gates[0].is_open.clear()
        gates[0].breaks = True
        for weights in model.parameters():
            weights.data += 1
        released = threading.Event()
        here.sender.refresh_source()
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(here.sender.send_weights, timeout_s=5, on_source_read=released.set)
            assert gates[0].reached.wait(10)
            assert released.wait(10)
            next(model.parameters()).data += 1  # the optimizer is half way
            gates[0].is_open.set()
            assert isinstance(call.exception(10), SyncAborted)
        here.wait(2)
        here.sender.send_weights(timeout_s=5)
        assert all(bits_equal(model, replica) for replica in replicas)


def test_a_second_try_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver fails while buckets are sent; the source's modules may be computing."""
    model, looked = random_model(SHAPES, 0), list[str]()

    class Source(ModuleSource):
        def tensors(self) -> list[NamedTensor]:
            looked.append(threading.current_thread().name)
            return super().tensors()

    gates: list[Gate] = []

    def wrap(transport: ReceiveTransport) -> Gate:
        gates.append(Gate(transport, "begin"))
        return gates[-1]

    replica = random_model(SHAPES, 1)
    with fleet(Source(model), options=SenderOptions(bucket_bytes=1 << 10)) as here:
        here.add(replica, engine="stays")
        here.add(random_model(SHAPES, 2), engine="fails", wrap=wrap)
        here.wait(2)
        here.sender.send_weights(timeout_s=5)
        for weights in model.parameters():
            weights.data += 1
        gates[0].breaks = True
        buffer = here.transport.buffer

        def buffer_after_the_loss(num_bytes: int, *, timeout_s: float) -> Tensor:
            while all(map(here.transport.is_connected, (0, 1))):
                time.sleep(0.001)
            return buffer(num_bytes, timeout_s=timeout_s)

        monkeypatch.setattr(here.transport, "buffer", buffer_after_the_loss)
        here.sender.refresh_source()
        looked.clear()
        stats = here.sender.send_weights(timeout_s=5, on_source_read=lambda: None)
        assert (stats.receivers, looked) == (1, [])
        assert bits_equal(model, replica)


def test_what_was_looked_up_for_a_call_that_came_to_nothing_is_looked_up_again() -> None:
    from tests.worlds.trainers import rows_of, trainer_of

    model, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        trainer.add(replica)
        trainer.wait(1)
        trainer.send()
        trainer.sender.refresh_source()
        other = trainer.ranks[1]
        assert isinstance(other, TrainerRank)
        other._link.disconnect()
        other._lose()
        with pytest.raises(SyncAborted, match="did not come"):
            trainer.sender.send_weights(timeout_s=0.2, on_source_read=lambda: None)
        with pytest.raises(SyncAborted):
            other.send_weights(timeout_s=0.2)
        for weights in model.parameters():
            weights.data += 1
        for source in trainer.sources:  # storage is replaced
            source.held = {name: tensor.clone() for name, tensor in source.held.items()}
        trainer.step()
        trainer.settle(1)
        assert bits_equal(model, replica)


@pytest.mark.parametrize("on_busy", ["wait", None])
def test_a_hook_can_be_removed_in_its_callback(
    opened: Open, on_busy: Literal["wait"] | None
) -> None:
    training = opened(on_busy)
    training.step()
    training.hook._callback = lambda _: training.hook.remove()
    training.step()
    training.hook.wait()
    training.step()
    assert (training.hook.steps, training.hook.syncs) == (2, 2)
    assert training.holds(1)


def refused_in_callback(training: Training, act: Callable[[], object]) -> str:
    """What `act` raises in the callback of a sync in the background."""
    raised: list[DeltaSyncError] = []

    def callback(_: object) -> None:
        try:
            act()
        except DeltaSyncError as error:
            raised.append(error)

    training.step()
    training.hook._callback = callback
    training.step()
    assert training.hook._sync_under_way is not None
    training.hook._sync_under_way.result(10)
    training.hook._callback = None
    training.hook.wait()
    training.step()
    training.hook.wait()
    assert training.holds(-1)
    [error] = raised
    return str(error)


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_waiting_in_the_callback_of_a_background_sync_is_refused(
    opened: Open, on_busy: Literal["wait", "skip"]
) -> None:
    training = opened(on_busy)
    assert "callback" in refused_in_callback(training, lambda: training.hook.wait())


def test_a_step_in_the_callback_of_a_background_sync_is_refused(opened: Open) -> None:
    training = opened("wait")
    assert "callback" in refused_in_callback(training, training.optimizer.step)


def test_a_step_in_the_callback_of_a_failed_background_sync_is_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights may not have been read yet when it failed."""
    training = opened("wait")
    training.step()
    raised: list[object] = []

    def callback(_: object) -> None:
        try:
            training.optimizer.step()
        except DeltaSyncError as error:
            raised.append(error)

    def fails(_: object) -> None:
        raise SourceChanged("planted")

    training.hook._callback = callback
    monkeypatch.setattr(training.sender._own, "one_call", fails)
    training.step()
    assert training.hook._sync_under_way is not None
    training.hook._sync_under_way.result(10)
    assert len(raised) == 1


def test_a_hook_removed_in_its_callback_while_a_step_waits_syncs_no_more(opened: Open) -> None:
    training = opened("wait")
    training.step()
    entered, go_on = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        entered.set()
        assert go_on.wait(20)
        training.hook.remove()

    training.hook._callback = callback
    training.step()
    assert entered.wait(20)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(training.step)
        assert wait([step], 0.2).not_done
        go_on.set()
        step.result(20)
    assert training.hook.syncs == 2
    assert training.holds(1)


def test_a_step_within_atexit_syncs_in_the_step() -> None:
    """No thread can begin there any more."""
    code = """
import atexit, threading
from tests.sync.test_background import Training
training = Training("wait")
training.step()
training.step()
training.hook.wait()
def last():
    training.step()
    assert training.hook.syncs == 3, training.hook.last_error
    assert training.holds(2)
    training.receivers.close()  # Python aborts where a daemon thread is within torch at the end
    print("synced")
atexit.register(last)
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "synced\n"), done.stderr


def test_a_model_that_is_another_one_is_seen_before_training_goes_on(
    opened: Open,
) -> None:
    training = opened("wait")
    training.step()
    training.model.register_buffer("new", torch.zeros(3))
    training.step()
    assert isinstance(training.hook.last_error, SourceChanged)
    assert training.holds(0)


def test_odd_settings_are_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    made = Fleet(random_model(SHAPES, 0))
    with pytest.raises(ConfigError, match="on_busy"):
        sync_after_step(optimizer, made.sender, on_busy="later")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no optimizer"):
        sync_after_step([], made.sender)
    made.close()


def test_no_optimizer_of_several_steps_before_the_weights_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, replica = random_model(SHAPES, 0).requires_grad_(True), random_model(SHAPES, 1)
    first, second = (torch.optim.SGD([weights], lr=0.1) for weights in model.parameters())
    with fleet(model) as here:
        here.add(replica)
        here.wait(1)
        hook = sync_after_step([first, second], here.sender, on_busy="wait", on_error="raise")

        def step() -> None:
            for optimizer, weights in zip((first, second), model.parameters(), strict=True):
                weights.grad = torch.ones_like(weights)
                optimizer.step()

        step()  # in which the first sync is done
        reading, go_on = held_back(monkeypatch)
        step()
        assert reading.wait(20)
        held = [weights.detach().clone() for weights in model.parameters()]
        with ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(step)
            assert wait([under_way], 0.2).not_done
            assert all(map(torch.equal, held, model.parameters()))
            go_on.set()
            under_way.result(20)
        hook.wait()
        assert hook.syncs == 3
        assert bits_equal(model, replica)


def test_ranks_of_a_trainer_do_not_skip() -> None:
    from tests.worlds.trainers import rows_of, trainer_of

    model = random_model(SHAPES, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        for rank in trainer.ranks:
            with pytest.raises(ConfigError, match="skip"):
                sync_after_step(optimizer, rank, on_busy="skip")


def test_a_rank_of_a_trainer_is_used_by_one_thread() -> None:
    from tests.worlds.trainers import rows_of, trainer_of

    model, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        trainer.add(replica)
        trainer.wait(1)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(trainer.ranks[1].send_weights, timeout_s=20)
            until(lambda: bool(trainer.ranks[1]._caller._calls))
            with pytest.raises(ConfigError, match="under way"):
                trainer.ranks[1].send_weights()
            assert trainer.sender.send_weights(timeout_s=10) == call.result(10)
        assert bits_equal(model, replica)


@pytest.mark.parametrize("where", ["source", "memory", "host memory", "callback"])
def test_ranks_count_the_same_calls_whatever_one_of_them_raises(where: str) -> None:
    """A rank that left one out would send the weights of another step than the others."""
    from tests.worlds.trainers import rows_of, trainer_of

    model, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        trainer.add(replica)
        trainer.wait(1)
        hooks: list[StepHook] = []
        optimizers: list[torch.optim.Optimizer] = []
        told: list[object] = []

        def callback(stats: object) -> None:
            told.append(stats)
            if len(told) == 2:
                raise ZeroDivisionError

        for number, (rank, source) in enumerate(zip(trainer.ranks, trainer.sources, strict=True)):
            held = [tensor.requires_grad_() for tensor in source.held.values() if tensor.numel()]
            optimizers.append(torch.optim.SGD(held, lr=1.0))
            fails = callback if number and where == "callback" else None
            hook = sync_after_step(
                optimizers[-1], rank, on_busy="wait", callback=fails, timeout_s=5
            )
            hooks.append(hook)

        def train(rank: int) -> None:
            for number in range(6):
                is_now = (rank, number) == (1, 2)
                kinds = {"source": SourceChanged, "host memory": MemoryError}
                planted = kinds.get(where, RuntimeError)("planted")
                trainer.sources[rank].fails = planted if is_now and where != "callback" else None
                for group in optimizers[rank].param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.full_like(parameter, -1.0)
                with suppress(StepApplied, ZeroDivisionError):
                    optimizers[rank].step()
            with suppress(StepApplied, ZeroDivisionError):
                hooks[rank].wait()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(train, range(2)))
        other = trainer.ranks[1]
        assert isinstance(other, TrainerRank)
        assert trainer.calls.call == other._call + 1
        for name, tensor in replica.named_parameters():
            parts = [source.held[name].detach() for source in trainer.sources]
            assert torch.equal(tensor, torch.cat(parts))
        for hook in hooks:
            hook.remove()


def test_ranks_of_a_trainer_sync_while_they_train() -> None:
    from tests.worlds.trainers import rows_of, trainer_of

    model, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        trainer.add(replica)
        trainer.wait(1)
        hooks: list[StepHook] = []
        optimizers: list[torch.optim.Optimizer] = []
        for rank, source in zip(trainer.ranks, trainer.sources, strict=True):
            held = [tensor.requires_grad_() for tensor in source.held.values() if tensor.numel()]
            optimizers.append(torch.optim.AdamW(held, lr=0.01))
            hooks.append(sync_after_step(optimizers[-1], rank, on_busy="wait", timeout_s=20))

        def train(rank: int) -> None:
            for number in range(6):
                torch.manual_seed(number)
                for group in optimizers[rank].param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter) * (number + 1)
                optimizers[rank].step()
            hooks[rank].wait()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(train, range(2)))
        assert [(hook.syncs, hook.failures) for hook in hooks] == [(6, 0)] * 2
        assert hooks[0].last_stats == hooks[1].last_stats
        for name, tensor in replica.named_parameters():
            parts = [source.held[name].detach() for source in trainer.sources]
            assert torch.equal(tensor, torch.cat(parts))
        for hook in hooks:
            hook.remove()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["step", "close", "open", "break"]), max_size=14))
def test_any_history_leaves_receivers_at_a_step_of_their_trainer(actions: list[str]) -> None:
    training = Training("skip")
    [gate] = training.gates
    try:
        for action in ["step", *actions]:
            match action:
                case "step":
                    training.step()
                case "close":
                    gate.is_open.clear()
                case "open":
                    gate.is_open.set()
                    training.hook.wait()
                    assert any(training.holds(n) for n in range(len(training.after)))
                case "break":
                    gate.breaks = True
        gate.is_open.set()
        training.hook.wait()
        for _ in range(3):
            training.sender.wait_for_receivers(1, timeout_s=10)
            training.step()
            training.hook.wait()
        assert training.holds(-1)
    finally:
        training.close()


@pytest.mark.gpu
def test_on_gpus_a_step_comes_after_what_was_read(opened: Open) -> None:
    training = opened("skip", device="cuda")
    told: list[SyncStats] = []
    training.hook._callback = told.append  # type: ignore[assignment]
    for _ in range(30):
        training.step()
        if training.hook.skipped % 3:
            training.hook.wait()
            assert any(training.holds(n) for n in range(len(training.after)))
    training.hook.wait()
    training.step()
    training.hook.wait()
    assert training.holds(-1)
    assert not any(one.lost for one in told)


def test_a_last_step_that_was_skipped_is_sent_by_a_call_after_the_hook_has_ended(
    opened: Open,
) -> None:
    training = opened("skip")
    [gate] = training.gates
    training.step()
    gate.is_open.clear()
    training.step()
    training.step()  # the last one
    gate.is_open.set()
    training.hook.wait()
    assert (training.hook.skipped, training.holds(2)) == (1, False)
    training.sender.send_weights(timeout_s=20)
    assert training.holds(2)
