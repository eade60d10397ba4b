"""Trainers of several ranks in threads of one process, for tests of whole syncs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from deltasync import (
    DeltaSyncError,
    NamedTensor,
    SenderOptions,
    SyncStats,
    WeightSender,
    WeightSource,
)
from deltasync.delta.shard import ShardSpec, placed
from deltasync.errors import TransportError, TransportTimeout
from deltasync.quant.fp8 import Fp8
from deltasync.sync.group import orders
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.source.tensors import Index
from deltasync.transports import inprocess
from deltasync.transports.base import Frame, SendTransport
from tests.worlds.links import AMPLE_S, Linking, Receivers, ThroughSender

Boxes = Mapping[str, ShardSpec]


class Sharded:
    """What a rank holds of a module, in memory of its own."""

    def __init__(self, module: nn.Module, boxes: Boxes, device: str = "cpu") -> None:
        self._module, self.boxes = module, boxes
        self._names = [name for name, _ in module.named_parameters() if name in boxes]
        self.held = {name: self._cut(name).clone().to(device) for name in self._names}
        self.fails: BaseException | None = None

    def step(self) -> None:
        """The optimizer has changed the module."""
        for name, tensor in self.held.items():
            tensor.copy_(self._cut(name))

    def tensors(self) -> list[NamedTensor]:
        if self.fails is not None:
            raise self.fails
        return [NamedTensor((n,), self.held[n], self.boxes[n]) for n in self._names]

    def _cut(self, name: str) -> Tensor:
        box = self.boxes[name]
        index = tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))
        return self._module.get_parameter(name).data[index]


class Rounded:
    """A source that computes what it sends."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor((n,), p.detach().half()) for n, p in self._module.named_parameters()]


def matrices(name: str, shape: tuple[int, ...]) -> Fp8 | None:
    """Which form is served of each parameter."""
    return Fp8() if len(shape) > 1 else None


def by_expert(name: str, shape: tuple[int, ...]) -> dict[str, Index] | None:
    """The names of the parts of (experts, 2 * width, hidden): gate beside up."""
    if name != "experts":
        return None
    width, found = shape[1] // 2, dict[str, Index]()
    for expert in range(shape[0]):
        found[f"experts.{expert}.gate"] = (expert, slice(0, width))
        found[f"experts.{expert}.up"] = (expert, slice(width, None))
    return found


class Hub(ThroughSender):
    """Rank 0's link to the others; `before` is told of each order before it is sent.

    Attributes:
        exchanged_bytes: Of the messages among ranks in the call under way, both ways.
    """

    def __init__(self, inner: SendTransport) -> None:
        super().__init__(inner)
        self.before: Callable[[orders.Said], object] = lambda order: None
        self.exchanged_bytes, self._others, self._call = 0, 0, 0

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        self._others = len(peers)
        return super().open_epoch(peers, timeout_s=timeout_s)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        order = orders.decode(frame.header)
        assert isinstance(order, orders.Order)
        if order.call != self._call:
            self.exchanged_bytes, self._call = 0, order.call
        self.exchanged_bytes += len(frame.header) * self._others
        self.before(order)
        super().send(frame, timeout_s=timeout_s)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        replies = super().collect_replies(timeout_s=timeout_s)
        self.exchanged_bytes += sum(len(one) for one in replies.values() if isinstance(one, bytes))
        return replies


class Trainer(Receivers):
    """All ranks of a trainer, and its receivers.

    Args:
        sources: Of each rank.
        wrap: Changes the links of ranks to receivers, by rank.
        link: Makes them.

    Attributes:
        hub: Rank 0's link to the others.
        around: Makes a context for each rank's call of `send_weights`, in its thread.
    """

    def __init__(
        self,
        sources: Sequence[WeightSource],
        *,
        options: SenderOptions | None = None,
        wrap: Callable[[int, SendTransport], SendTransport] = lambda rank, link: link,
        link: Callable[[], Linking] = inprocess.Sender,
    ) -> None:
        super().__init__([link() for _ in sources])
        ends = [wrap(rank, link) for rank, link in enumerate(self.links)]
        hub, world = inprocess.Sender(), len(sources)
        self.hub = Hub(hub)
        group = TrainerGroup(self.hub, world)
        self.sender = WeightSender(sources[0], ends[0], options=options, group=group)
        self.ranks: list[WeightSender | TrainerRank] = [self.sender]
        self.ranks += [
            TrainerRank(
                sources[rank],
                ends[rank],
                hub.receiver(),
                rank=rank,
                world=world,
                options=options,
            )
            for rank in range(1, world)
        ]
        self._threads = ThreadPoolExecutor(world)
        self.around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    @property
    def calls(self) -> TrainerGroup:
        """What rank 0 knows of the others."""
        assert self.sender._group is not None
        return self.sender._group

    def outcomes(self, *, timeout_s: float = AMPLE_S) -> list[SyncStats | Exception]:
        """What `send_weights` returns or raises on each rank."""
        return [one.result() for one in self.sending(timeout_s=timeout_s)]

    def sending(self, *, timeout_s: float = AMPLE_S) -> list[Future[SyncStats | Exception]]:
        """The same, while they do."""

        def send(rank: WeightSender | TrainerRank) -> SyncStats | Exception:
            try:
                with self.around():
                    return rank.send_weights(timeout_s=timeout_s)
            except (DeltaSyncError, MemoryError, RuntimeError) as error:
                return error.with_traceback(None)

        return [self._threads.submit(send, rank) for rank in self.ranks]

    def send(self, *, timeout_s: float = AMPLE_S) -> SyncStats:
        """Sync; every rank is told the same."""
        found = self.outcomes(timeout_s=timeout_s)
        stats = found[0]
        assert isinstance(stats, SyncStats), found
        assert all(outcome == stats for outcome in found), found
        return stats

    def settle(self, count: int) -> SyncStats:
        """Sync until so many receivers are members and nobody is lost."""
        for turn in range(20):  # what fails costs a timeout, which a busy machine may need longer
            with contextlib.suppress(TransportTimeout):
                self.sender.wait_for_receivers(count, timeout_s=10)
            found = self.outcomes(timeout_s=max(1.0, turn))
            stats = found[0]
            if isinstance(stats, SyncStats) and stats.receivers == count and not stats.lost:
                return stats
        raise AssertionError(f"does not settle: {found}")

    def close(self) -> None:
        super().close()
        for rank in self.ranks[1:]:
            rank.close()
        self._threads.shutdown()


class Split(Trainer):
    """The same, of a whole model that no rank has, and what each rank holds of it."""

    def __init__(self, module: nn.Module, boxes: Sequence[Boxes], **settings: Any) -> None:
        self.module = module
        self.sources = [Sharded(module, one) for one in boxes]
        super().__init__(self.sources, **settings)

    def step(self) -> None:
        for source in self.sources:
            source.step()


@contextlib.contextmanager
def trainer_of(module: nn.Module, boxes: Sequence[Boxes], **settings: Any) -> Iterator[Split]:
    made = Split(module, boxes, **settings)
    try:
        yield made
    finally:
        made.close()


def rows_of(module: nn.Module, world: int) -> list[dict[str, ShardSpec]]:
    """As FSDP2 shards: rows of everything, the first ranks more than the last; scalars whole."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    return [
        {n: placed(s, (world,), (rank,), [(0, 1) if s else None]) for n, s in shapes.items()}
        for rank in range(world)
    ]
