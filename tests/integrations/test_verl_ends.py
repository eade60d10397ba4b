"""What verl's checkpoint engine does at both ends, over every link; tests/verl has verl itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import NamedTensor, SenderOptions, ShardSpec, subscribe
from deltasync.delta.bits import as_bits
from deltasync.errors import SyncAborted, TransportTimeout
from deltasync.integrations.verl_ends import Metrics, Options, Rollout, SendingRank, Trainer
from deltasync.sync.events import SyncEvent, SyncFailed
from tests.worlds.fleets import outcome

Weights = dict[str, Tensor]
Load = Callable[[Rollout], Coroutine[Any, Any, Any]]
LINKS = [
    "shared_memory",
    "gloo",
    pytest.param("cuda_ipc", marks=pytest.mark.gpu),
    pytest.param("nccl", marks=pytest.mark.multigpu),
]


def options_of(link: Any, timeout_s: float = 30.0) -> Options:
    return Options(link=link, host="127.0.0.1", timeout_s=timeout_s)


def weights_on(device: str = "cpu") -> Weights:
    torch.manual_seed(0)
    weights = {"a": torch.randn(300, 70), "b": torch.randn(9).bfloat16(), "c": torch.zeros(0, 2)}
    return {name: tensor.to(device) for name, tensor in weights.items()}


def exported(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        gathered = tensor.clone()
        yield name, gathered
        gathered.fill_(-1)


async def drain(weights: AsyncIterator[tuple[str, Tensor]]) -> Weights:
    return {name: tensor.clone() async for name, tensor in weights}


async def drained(rollout: Rollout) -> Weights:
    return await drain(rollout.weights())


async def taken(rollout: Rollout) -> Weights:
    found = await drained(rollout)
    rollout.confirm()
    return found


def assert_same(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(as_bits(tensor), as_bits(wanted[name]).to(tensor.device)), name


class Ends:
    """A trainer's ranks, each with what sends, and rollouts.

    Args:
        sends: Sends a rank's weights to rollouts of these names.
    """

    def __init__(
        self,
        stack: ExitStack,
        ranks: Sequence[Trainer | SendingRank],
        sends: Sequence[Callable[[list[str]], Metrics | None]],
        options: Options,
        rollouts: int = 1,
    ) -> None:
        self.ranks, self._sends, self._link = ranks, sends, options.link
        self.rollouts = [Rollout(options) for _ in range(rollouts)]
        for end in (*self.rollouts, *ranks):
            stack.callback(end.close)

    def update(
        self, load: Load = taken, rollouts: Sequence[Rollout] | None = None
    ) -> tuple[Metrics | None, list[Any]]:
        """Sync all rollouts, of which these load. Returns rank 0's metrics, and what was loaded."""
        here = self.rollouts if rollouts is None else rollouts
        names = [rollout.prepare() for rollout in self.rollouts]
        for rollout in self.rollouts:
            addresses = [rank.address for rank in self.ranks]
            rollout.connect(addresses, members=self.ranks[0].members)

        def receive(rollout: Rollout) -> Any:
            if self._link == "nccl":
                torch.cuda.set_device(1)
            return asyncio.run(load(rollout))

        with ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(receive, rollout) for rollout in here]
            first, *others = [pool.submit(send, names) for send in self._sends]
            assert [other.result() for other in others] == [None] * len(others)
            return first.result(), [each.result() for each in loads]


def trainer(stack: ExitStack, weights: Weights, link: str = "shared_memory", **more: Any) -> Ends:
    """Of one rank, to which all weights are passed."""
    options = options_of(link, more.pop("timeout_s", 30.0))
    one = Trainer(options, SenderOptions(snapshot_device="cpu", bucket_bytes=4096))
    return Ends(stack, [one], [lambda names: one.send(exported(weights), names)], options, **more)


@pytest.mark.parametrize("link", LINKS)
def test_a_rollout_is_given_what_it_does_not_have(link: str) -> None:
    if link == "nccl":
        torch.cuda.set_device(0)
    weights = weights_on("cuda:0" if link in ("cuda_ipc", "nccl") else "cpu")
    with ExitStack() as stack:
        here = trainer(stack, weights, link)
        metrics, (found,) = here.update()
        assert_same(found, weights)
        assert metrics is not None
        assert metrics["checkpoint_engine/full_synced"] == 1
        for step in range(3):
            weights["a"][step, ::9] += 1
            metrics, (found,) = here.update()
            assert_same(found, {"a": weights["a"]})
            assert metrics is not None
            assert metrics["checkpoint_engine/changed_elems"] == 8
        assert here.update()[1] == [{}]
        here.rollouts[0].forget()
        assert_same(here.update()[1][0], weights)


def test_workers_of_an_engine_are_given_the_same_after_an_update_that_reached_one_of_them() -> None:
    weights = weights_on()
    before = weights["a"].clone()
    with ExitStack() as stack:
        here = trainer(stack, weights, rollouts=2, timeout_s=4.0)

        def update(rollouts: Sequence[Rollout]) -> list[Weights]:
            found = here.update(drained, rollouts)[1]
            for rollout in here.rollouts:
                rollout.confirm()
            return found

        update(here.rollouts)
        weights["a"][2, 3] += 1
        with pytest.raises(SyncAborted, match="1 of 2"):
            update(here.rollouts[:1])
        weights["a"].copy_(before)  # which the second worker never knew to be otherwise
        for found in update(here.rollouts):
            assert_same(found, weights)
        assert update(here.rollouts) == [{}, {}]


def test_a_load_that_begins_when_its_update_was_given_up_gets_nothing() -> None:
    with ExitStack() as stack:
        rollout = Rollout(options_of("shared_memory"))
        stack.callback(rollout.close)
        rollout.prepare()
        late = rollout.weights()
        rollout.prepare()
        with pytest.raises(SyncAborted, match="given up"):
            asyncio.run(drain(late))


@pytest.mark.parametrize("has_all", [False, True])
def test_weights_that_are_lost_during_a_load_are_given_again(has_all: bool) -> None:
    async def interrupted(rollout: Rollout) -> None:
        given = rollout.weights()
        await anext(given)
        if has_all:
            await drain(given)
        rollout.forget()
        if not has_all:
            with pytest.raises(SyncAborted, match="given up"):
                await drain(given)
        rollout.confirm()

    with ExitStack() as stack:
        weights = weights_on()
        here = trainer(stack, weights)
        here.update(interrupted)
        assert_same(here.update()[1][0], weights)


def test_a_rollout_that_does_not_come_is_a_failure() -> None:
    events: list[SyncEvent] = []
    with ExitStack() as stack, subscribe(events.append):
        here = trainer(stack, weights_on(), timeout_s=0.2)
        error = outcome(lambda: here.update(rollouts=[]))
    assert isinstance(error, TransportTimeout)
    assert [event.error for event in events if isinstance(event, SyncFailed)] == [error]


class Held:
    """What a rank has: the rows of a tensor that one of two holds, or all, under two names."""

    def __init__(self, whole: Tensor, rank: int | None) -> None:
        if rank is None:
            self._tensors = [NamedTensor(("lm_head", "embed"), whole)]
            return
        rows = len(whole) // 2
        offset, size = (rank * rows, 0), (rows, whole.shape[1])
        part = whole[rank * rows : (rank + 1) * rows]
        self._tensors = [NamedTensor(("a",), part, ShardSpec(tuple(whole.shape), offset, size))]

    def tensors(self) -> list[NamedTensor]:
        return self._tensors


@pytest.mark.parametrize(
    ("link", "world"), [("shared_memory", 2), ("gloo", 2), ("shared_memory", 1)]
)
def test_every_rank_sends_what_it_holds_under_each_of_its_names(link: str, world: int) -> None:
    options, sizes = options_of(link), SenderOptions(wire_dtypes={"*": "bfloat16"})
    whole = torch.randn(40, 30)
    ranks = [SendingRank(options, sizes, is_master=number == 0) for number in range(world)]
    hub, names = ranks[0].hub, ["a"] if world == 2 else ["lm_head", "embed"]
    assert hub is not None

    def sends(number: int) -> Callable[[list[str]], Metrics | None]:
        held = Held(whole, number if world == 2 else None)
        return lambda names: ranks[number].send(held, names, hub, number, world)

    with ExitStack() as stack:
        here = Ends(stack, ranks, [sends(number) for number in range(world)], options)
        for changed in (1200, 30, 30):
            metrics, (found,) = here.update()
            assert metrics is not None
            assert metrics["checkpoint_engine/changed_elems"] == changed
            assert_same(found, dict.fromkeys(names, whole.bfloat16()))
            whole[20] *= -3
