"""Both ends of each public call that `tests.sync.interrupts` strikes: small, in one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    StagingThread,
    StoreReceiver,
    StoreSender,
    SyncStats,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.delta.bits import as_bits
from deltasync.delta.snapshot import MIN_BUCKET_BYTES
from deltasync.errors import DeltaSyncError
from deltasync.store.anchors import PublishOptions
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.protocol.round import Owner
from tests.sync.interrupts import World
from tests.worlds.fleets import Here, OneCall, engine_of, fleet_of
from tests.worlds.links import LINKS, Serving, bits_equal, random_model, until
from tests.worlds.trainers import Split, rows_of

SHAPES: dict[str, tuple[int, ...]] = {"a": (64,), "b": (33,)}
LARGE: dict[str, tuple[int, ...]] = {"a": (4, 1024), "b": (33,)}
_AT_ONCE: dict[str, Any] = {
    "sender": SenderOptions(bucket_bytes=MIN_BUCKET_BYTES),
    "receiver": ReceiverOptions(max_staged_bytes=1),
}
_WAIT_S = 4.0


def change(source: nn.Module) -> None:
    """A step back or forth: what a version changes, the next one may change back."""
    for number, weights in enumerate(source.parameters()):
        as_bits(weights.data).view(-1)[3] ^= 1
        if number:  # and what is nowhere else
            as_bits(weights.data).view(-1)[5] += 1


def retried(call: Callable[[], bool]) -> None:
    """Call until it says that it has succeeded: receivers may be on their way back."""
    end, last = time.monotonic() + 2 * _WAIT_S, Exception("it did not succeed")
    while time.monotonic() < end:
        try:
            if call():
                return
        except DeltaSyncError as error:
            last = error.with_traceback(None)
            time.sleep(0.02)
    raise AssertionError("no calm sync") from last


class _Watching(Owner):
    """Lets a test act when its sender says where a sync is."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def begun(self, *_: Any, **__: Any) -> None:
        self._pair.on_phase()

    def decided(self, *_: Any, **__: Any) -> None:
        self._pair.on_phase()

    def held(self, *_: Any) -> None:
        self._pair.on_phase()


class Pair:
    """A trainer and its engines, over one link."""

    def __init__(
        self,
        count: int,
        *,
        link: str = "in process",
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        sender: SenderOptions | None = None,
        receiver: ReceiverOptions | None = None,
    ) -> None:
        self._stack = ExitStack()
        self.source = random_model(shapes, 0)
        self.replicas = [random_model(shapes, number + 1) for number in range(count)]
        self._options = receiver
        self.on_phase: Callable[[], object] = lambda: None
        self.link = LINKS[link]()
        self.sender = WeightSender(
            ModuleSource(self.source), self.link, options=sender, owner=_Watching(self)
        )
        self._stack.callback(self.sender.close)
        self.serving: list[Serving] = []

    def receiver(self, number: int) -> WeightReceiver:
        target, link = ModuleTarget(self.replicas[number]), self.link.receiver()
        return WeightReceiver(target, link, engine=f"e{number}", options=self._options)

    def sync(self) -> bool:
        """Whether all have the version."""
        change(self.source)
        count = len(self.replicas)
        self.sender.wait_for_receivers(count, timeout_s=_WAIT_S)
        return self.sender.send_weights(timeout_s=_WAIT_S).receivers == count

    def check(self) -> None:
        until(lambda: all(bits_equal(self.source, replica) for replica in self.replicas))

    def close(self) -> None:
        for serving in self.serving:
            serving.stop()
        self._stack.close()


class Sending(Pair):
    """The trainer is struck: a delta to members, or joins before it."""

    def __init__(self, count: int = 2, *, joins: bool = False, **options: Any) -> None:
        super().__init__(count, **options)
        self._joins = joins
        self.serving = [Serving(self.receiver(number)).start() for number in range(count)]
        self.calm()

    def prepare(self) -> None:
        change(self.source)
        self.source.get_parameter("a").data = self.source.get_parameter("a").data.clone()
        if self._joins:  # an engine that was restarted, with other weights
            self.serving[0].stop()
            self.replicas[0].get_parameter("a").data.add_(1)
            self.serving[0] = Serving(self.receiver(0)).start()

    def act(self) -> None:
        if self._joins:
            self.sender.wait_for_receivers(len(self.replicas), timeout_s=_WAIT_S)
        self.sender.send_weights(timeout_s=_WAIT_S)

    def calm(self) -> None:
        retried(self.sync)
        self.check()


class Stepping(Pair):
    """The trainer is struck in an optimizer's step, after which the weights are sent."""

    def __init__(self, on_busy: Any) -> None:
        super().__init__(1)
        self.serving = [Serving(self.receiver(0)).start()]
        self.source.requires_grad_(True)
        self._optimizer = torch.optim.SGD(self.source.parameters(), lr=0.5)
        self._hook = sync_after_step(
            self._optimizer, self.sender, on_busy=on_busy, timeout_s=_WAIT_S
        )
        self.calm()

    def prepare(self) -> None:
        torch.set_grad_enabled(True)  # which torch leaves off if a step is interrupted
        for weights in self.source.parameters():
            weights.grad = torch.ones_like(weights)

    def act(self) -> None:
        self._optimizer.step()

    def calm(self) -> None:
        retried(self._step)
        self.check()

    def _step(self) -> bool:
        self.prepare()
        syncs = self._hook.syncs
        self._optimizer.step()
        self._hook.wait()
        return self._hook.syncs > syncs and self.sender.num_receivers == 1


class Receiving(Pair):
    """The engine is struck as it receives, or as it commits what it or a thread has staged."""

    def __init__(self, how: str = "receive", *, joins: bool = False, **options: Any) -> None:
        super().__init__(1, **options)
        self._trainer, self._how, self._joins = ThreadPoolExecutor(1), how, joins
        self._receiver = self.receiver(0)
        self._stack.callback(self._receiver.close)
        if how == "commit":
            self._staging = self._stack.enter_context(StagingThread(self._receiver))
        self._sending = self._trainer.submit(retried, self.sync)
        self.calm()

    def prepare(self) -> None:
        if self._joins:
            self._receiver.invalidate()
            self.replicas[0].get_parameter("a").data.add_(1)
        self._sending = self._trainer.submit(retried, self.sync)

    def act(self) -> None:
        self._take(_WAIT_S)

    def _take(self, timeout_s: float) -> None:
        if self._how == "receive":
            self._receiver.receive_weights(timeout_s=timeout_s)
        elif self._how == "commit":
            if self._staging.wait_staged(timeout_s=timeout_s):
                self._staging.commit()
        elif self._receiver.stage(timeout_s=timeout_s):
            self._receiver.commit()

    def calm(self) -> None:
        self._receive()
        self._sending = self._trainer.submit(retried, self.sync)
        self._receive()
        self.check()

    def _receive(self) -> None:
        """Until the trainer is content."""
        while not self._sending.done():
            with contextlib.suppress(DeltaSyncError):
                self._take(0.05)
        self._sending.result()

    def close(self) -> None:
        self.sender.close()
        self._trainer.shutdown()
        super().close()


class Stored:
    """A trainer and an engine, with a store between them. `which` end is struck."""

    def __init__(self, which: str) -> None:
        self._stack, self._which = ExitStack(), which
        url = self._url = self._stack.enter_context(TemporaryDirectory()) + "/store"
        self.source, self.replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
        publishing = PublishOptions(anchor_every=4)
        self._sender = StoreSender(ModuleSource(self.source), url, publishing=publishing)
        self._sender.publish()
        self._receiver = StoreReceiver(ModuleTarget(self.replica), url)
        self._stack.callback(self._receiver.close)
        self._receiver.fetch()
        if which == "follow":
            self._follower = self._stack.enter_context(self._receiver.follow())

    def prepare(self) -> None:
        change(self.source)
        if self._which != "publish":
            self._sender.publish()

    def act(self) -> None:
        if self._which == "publish":
            self._sender.publish()
        else:
            self._read()

    def _read(self) -> None:
        if self._which == "follow":
            if self._follower.wait_staged(timeout_s=_WAIT_S):
                self._follower.commit()
        else:
            self._receiver.fetch(timeout_s=_WAIT_S)

    def calm(self) -> None:
        change(self.source)
        retried(lambda: self._sender.publish().version > 0)
        retried(self._is_read)
        assert bits_equal(self.source, self.replica)
        if self._which == "publish":
            fresh = random_model(SHAPES, 2)
            with StoreReceiver(ModuleTarget(fresh), self._url) as other:
                other.fetch()
            assert bits_equal(self.source, fresh), "a new reader"

    def _is_read(self) -> bool:
        self._read()
        return self._receiver.version == self._sender.version

    def close(self) -> None:
        self._receiver.close()
        self._stack.close()


class Fleet:
    """The trainer of a fleet, or of one engine, is struck, also as a server comes and goes."""

    def __init__(
        self, make: Callable[[Path], AbstractContextManager[Here]], *, comes: bool = False
    ) -> None:
        self._stack, self._comes = ExitStack(), comes
        path = Path(self._stack.enter_context(TemporaryDirectory()))
        self._here = self._stack.enter_context(make(path))
        self._here.catch_up()

    def prepare(self) -> None:
        self._here.step()

    def act(self) -> None:
        fleet, server = self._here.fleet, self._here.servers["0"]
        if self._comes:
            fleet.remove("0")
            fleet.add(server, workers=server.world, paused=server.paused, name="0")
        self._here.send()

    def calm(self) -> None:
        if self._comes and "0" not in self._here.fleet.servers():
            self._here.add(self._here.servers["0"], "0")
        self._here.catch_up()
        self._here.check()
        assert not self._here.dirty()

    def close(self) -> None:
        self._stack.close()


class Ranks:
    """One rank of a trainer of two is struck."""

    def __init__(self, struck: int) -> None:
        self.source, self._struck = random_model(SHAPES, 0), struck
        self._trainer = Split(self.source, rows_of(self.source, 2))
        self._replica = random_model(SHAPES, 1)
        self._trainer.add(self._replica)
        self._others = ThreadPoolExecutor(2)
        self._calls: dict[int, Future[SyncStats]] = {}
        self.calm()

    def prepare(self) -> None:
        change(self.source)
        self._trainer.step()

    def act(self) -> SyncStats:
        """This rank in this thread; each other one in a thread of its own, once at a time."""
        ranks = self._trainer.ranks
        for number, rank in enumerate(ranks):
            last = self._calls.get(number)
            if number != self._struck and (last is None or last.done()):
                self._calls[number] = self._others.submit(self._goes_on, rank)
        return ranks[self._struck].send_weights(timeout_s=1.0)

    def _goes_on(self, rank: WeightSender | TrainerRank) -> SyncStats:
        """As a loop that trains: a call that has failed is followed by the next one."""
        for _ in range(20):
            with contextlib.suppress(DeltaSyncError):
                return rank.send_weights(timeout_s=1.0)
        raise AssertionError("another rank never comes to an end")

    def calm(self) -> None:
        retried(self._is_sent)
        until(lambda: bits_equal(self.source, self._replica))

    def _is_sent(self) -> bool:
        others = [one for number, one in self._calls.items() if number != self._struck]
        if all(one.done() for one in others):
            self.prepare()  # or a rank would compare what changes
        stats = self.act()
        for one in self._calls.values():
            one.result(30)
        return stats.receivers == 1

    def close(self) -> None:
        self._trainer.close()
        self._others.shutdown()


WORLDS: dict[str, Callable[[], World]] = {
    "send": Sending,
    "send: joins": partial(Sending, joins=True, link="shared memory"),
    "send: at once": partial(Sending, shapes=LARGE, link="shared memory", **_AT_ONCE),
    "send: gloo": partial(Sending, link="gloo"),
    "step": partial(Stepping, None),
    "step: in the background": partial(Stepping, "wait"),
    "receive": Receiving,
    "receive: joins": partial(Receiving, joins=True, link="shared memory"),
    "receive: at once": partial(Receiving, "stage", shapes=LARGE, **_AT_ONCE),
    "receive: gloo": partial(Receiving, link="gloo"),
    "stage": partial(Receiving, "stage"),
    "commit": partial(Receiving, "commit"),
    "publish": partial(Stored, "publish"),
    "fetch": partial(Stored, "fetch"),
    "follow": partial(Stored, "follow"),
    "fleet: one call": partial(Fleet, partial(fleet_of, count=2, kind=OneCall)),
    "fleet: rolling": partial(Fleet, partial(fleet_of, count=2, pauses="rolling")),
    "fleet: comes and goes": partial(Fleet, partial(fleet_of, count=2), comes=True),
    "engine": partial(Fleet, partial(engine_of, timeout_s=3.0)),
    "rank 0": partial(Ranks, 0),
    "rank 1": partial(Ranks, 1),
}
"""By the calls that are struck."""
