"""The trainer's end: a model here, an engine in another process, deltasync between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import baselines
from benchmarks.gpu.engine import Watch, free_memory, synchronize
from benchmarks.gpu.exchange import TRAINER, Broadcasts, Exchange, SharedBuffer, share
from benchmarks.gpu.geometry import GEOMETRIES
from benchmarks.gpu.links import listen
from benchmarks.gpu.serving import served_module, served_source
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.workload import bits_of
from benchmarks.processes import Told
from deltasync import ModuleSource, SenderOptions, SyncStats, WeightSender

_EXIT_TIMEOUT_S = 10.0
_TIMEOUT_S = 120.0
_FEWEST = 3  # rounds of which a median is taken
DENSE_BYTES, SPARSE_BYTES = 2, 6
"""Bytes of shared memory for each element: for all values, or for all indices and values."""


@dataclass(frozen=True, slots=True)
class Synced:
    """One sync, from the call of `send_weights` to its return."""

    seconds: float
    stats: SyncStats


@dataclass(frozen=True, slots=True)
class Transferred:
    """One run of a baseline, from its beginning to the engine's answer, and its parts."""

    seconds: float
    parts: dict[str, float]


class EngineProcess(Told):
    """The engine, as the trainer sees it: words go there, answers come back."""

    exchange: Exchange | None = None  # where each pair needs one of its own

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        super().__init__("benchmarks.gpu.engine", setup.to_json(), str(folder))
        if setup.link == "collective" and setup.engine == 1:
            self.exchange = Broadcasts.join(setup, folder, TRAINER)

    def tell(self, do: str, **arguments: object) -> None:
        """Let it do something; it answers when that is done."""
        self.say({"do": do, **arguments})

    def close(self) -> None:
        """Let it end, or end it."""
        self.let_go()
        if isinstance(self.exchange, Broadcasts):
            self.exchange.close()  # both ends at once
        with suppress(RuntimeError):
            self.end(_EXIT_TIMEOUT_S)
        self.bury()


@contextmanager
def open_engine(setup: Setup) -> Iterator[EngineProcess]:
    """Start the engine's process; it ends with the block."""
    with TemporaryDirectory(prefix="deltasync-") as folder:
        engine = EngineProcess(setup, Path(folder))
        yield engine
        engine.close()  # after a failure the whole process group is ended from outside


class Pair:
    """Both ends of one link, joined and at the same weights.

    Attributes:
        module: The trainer's weights.
        sender: deltasync's end.
        numel, weights_bytes, num_parameters: Its size.
    """

    def __init__(
        self,
        engine: EngineProcess,
        module: nn.Module,
        sender: WeightSender,
        exchange: Exchange,
        form: str,
        others: Sequence[EngineProcess],
    ) -> None:
        self.module, self.sender, self._form = module, sender, form
        sizes = [(p.numel(), p.nbytes) for p in module.parameters()]
        self.numel, self.weights_bytes = map(sum, zip(*sizes, strict=True))
        self.num_parameters = len(sizes)
        self._engine, self._exchange = engine, exchange
        self._engines = [engine, *others]
        self._device = engine.setup.device("trainer")
        self._base: list[Tensor] = []

    def join(self) -> None:
        """Let the engine in: both models began with the same bits."""
        self._let_receive()
        self.sender.wait_for_receivers(len(self._engines), timeout_s=_TIMEOUT_S)
        self._finish_sync(self.sender.send_weights(timeout_s=_TIMEOUT_S))

    def sync(self, options: SenderOptions | None = None) -> Synced:
        """One sync of whatever has changed."""
        if options is not None:
            self.sender.options = options
        self._let_receive()
        synchronize(self._device)
        began = time.perf_counter()
        stats = self.sender.send_weights(timeout_s=_TIMEOUT_S)
        synced = Synced(time.perf_counter() - began, stats)
        self._finish_sync(stats)
        return synced

    def dense(self) -> Transferred:
        """The dense baseline: packed, moved, copied into parameters, acknowledged."""
        synchronize(self._device)
        began = time.perf_counter()
        self._give("dense", self._give_dense)
        self._engine.answer()
        done = Transferred(time.perf_counter() - began, {})
        for base, bits in zip(self._base, bits_of(self.module), strict=False):
            base.copy_(bits)  # what the sparse baseline compares with, once it is in use
        return done

    def usual_sparse(self) -> Transferred:
        """The usual sparse baseline: all that changed since the last baseline was run."""
        synchronize(self._device)
        began = time.perf_counter()
        found = baselines.find_changes(bits_of(self.module), self._base)
        synchronize(self._device)
        diff_s = time.perf_counter() - began
        counts = [len(indices) for indices, _ in found]
        self._give("sparse", lambda: baselines.give_sparse(found, self._exchange), counts=counts)
        apply_s = self._engine.answer()["apply_s"]
        seconds = time.perf_counter() - began
        baselines.advance(self._base, found)  # not timed: it might overlap
        wire_s = seconds - diff_s - apply_s
        return Transferred(seconds, {"diff_s": diff_s, "wire_s": wire_s, "apply_s": apply_s})

    def start_baselines(self) -> bool:
        """Bring the model that baselines write to the trainer's weights; checks the dense one."""
        self.dense()
        self._base = [bits.clone() for bits in bits_of(self.module)]
        self.check(baseline=True)
        return True

    def check(self, *, baseline: bool = False) -> None:
        """Raises unless both ends hold the same bits, compared outside the library."""
        self._give("differing", self._give_dense, baseline=baseline)
        if wrong := self._engine.answer():
            raise RuntimeError(f"{wrong} parameters of the engine are not the trainer's")

    def watch(self) -> None:
        """From now on the memory taken at both ends is measured."""
        self._engine.tell("watch")
        self._engine.answer()
        free_memory(self._device)
        self._watch = Watch(self._device)

    def taken(self) -> dict[str, int]:
        """Bytes taken since, beside weights and snapshot."""
        mine = self._watch.taken(beside=2 * self.weights_bytes + self._exchange.num_bytes)
        self._engine.tell("taken")
        return {"sender": mine, "receiver": int(self._engine.answer())}

    def release(self) -> None:
        """Let go of the weights, whoever still holds this object."""
        self.sender.close()
        del self.module, self.sender, self._base, self._exchange

    def _give(self, do: str, give: Callable[[], None], **arguments: object) -> None:
        """Broadcasts meet the engine halfway; shared memory is announced once it is full."""
        if self._engine.setup.link == "collective":
            self._engine.tell(do, **arguments)
            give()
        else:
            give()
            synchronize(self._device)
            self._engine.tell(do, **arguments)

    def _give_dense(self) -> None:
        weights = [p.detach().view(-1) for p in self.module.parameters()]
        if self._form:
            served = served_module(self.module).parameters()
            weights = [p.view(-1).view(torch.uint8) for p in served]
        baselines.give_dense(weights, self._exchange)

    def _let_receive(self) -> None:
        for engine in self._engines:
            engine.tell("receive")

    def _finish_sync(self, stats: SyncStats) -> None:
        if stats.lost:
            raise RuntimeError(f"an engine left: {stats.lost}")
        for engine in self._engines:
            engine.answer()


@contextmanager
def open_pair(
    engine: EngineProcess,
    geometry: str,
    options: SenderOptions | None = None,
    *,
    shared_bytes: int = DENSE_BYTES,
    form: str = "",
    others: Sequence[EngineProcess] = (),
) -> Iterator[Pair]:
    """Build the model at both ends and join them; all of it is freed with the block.

    Args:
        engine: The other process.
        geometry: Key of GEOMETRIES.
        options: deltasync's.
        shared_bytes: An element, of memory for baselines where that is shared.
        form: What the engine serves; "" for the trainer's dtype.
        others: Further engines, which only receive.
    """
    device = engine.setup.device("trainer")
    exchange, how = engine.exchange, None
    module = GEOMETRIES[geometry].build(device)
    if exchange is None:
        num_bytes = shared_bytes * sum(p.numel() for p in module.parameters())
        memory, how = share(num_bytes, device, engine.folder)
        exchange = SharedBuffer(memory)
        del memory
    transport, address = listen(engine.setup.link, device, engine.folder / "weights.sock")
    for one in (engine, *others):
        one.tell("open", geometry=geometry, address=address, buffer=how, form=form)
        one.answer()
    source = served_source(module) if form else ModuleSource(module)
    sender = WeightSender(source, transport, options=options)
    pair = Pair(engine, module, sender, exchange, form, others)
    del module, source, sender, transport, exchange
    try:
        pair.join()
        yield pair
    finally:
        pair.release()
        free_memory(device)
    for one in (engine, *others):
        one.tell("close")
        one.answer()
    free_memory(device)


def rounds(
    run: Callable[[], object],
    before: Callable[[], object],
    *,
    count: int,
    warm_ups: int,
    limit_s: float,
) -> Iterator[Any]:
    """Results of `count` runs, fewer if they take over `limit_s`, after those that do not count."""
    for _ in range(warm_ups):
        before()
        run()
    spent_s = 0.0
    for done in range(count):
        if done >= _FEWEST and spent_s > limit_s:
            return
        before()
        began = time.perf_counter()
        result = run()
        spent_s += time.perf_counter() - began
        yield result
