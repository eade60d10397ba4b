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

from deltasync import NamedTensor, SenderOptions, ShardSpec
from deltasync.delta.bits import as_bits
from deltasync.errors import SyncAborted, TransportTimeout
from deltasync.integrations.streamed import StreamedWeights
from deltasync.integrations.verl_ends import Metrics, Options, Rollout, SendingRank

Weights = dict[str, Tensor]
Load = Callable[[Rollout], Coroutine[Any, Any, Weights]]
LINKS = [
    "shared_memory",
    "gloo",
    pytest.param("cuda_ipc", marks=pytest.mark.gpu),
    pytest.param("nccl", marks=pytest.mark.multigpu),
]


def options_of(link: Any, timeout_s: float = 30.0, **sender: Any) -> Options:
    options = SenderOptions(**{"snapshot_device": "cpu", "bucket_bytes": 4096, **sender})
    return Options(link=link, host="127.0.0.1", timeout_s=timeout_s, sender=options)


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
        ranks: Sequence[SendingRank],
        sends: Sequence[Callable[[list[str]], Metrics | None]],
        options: Options,
        rollouts: int = 1,
    ) -> None:
        self.ranks, self._sends, self._link = ranks, sends, options.link
        self.rollouts = [Rollout(options) for _ in range(rollouts)]
        for rollout in self.rollouts:
            stack.callback(rollout.close)
        for rank in ranks:
            stack.callback(rank.close)

    def update(
        self, rollouts: Sequence[Rollout] | None = None, load: Load = drained
    ) -> tuple[Metrics | None, list[Weights]]:
        """Sync all rollouts, of which these load. Returns rank 0's metrics, and what was loaded."""
        here = self.rollouts if rollouts is None else rollouts
        names = [rollout.prepare() for rollout in self.rollouts]
        for rollout in self.rollouts:
            addresses = [rank.address for rank in self.ranks]
            rollout.connect(addresses, members=self.ranks[0].members)

        def receive(rollout: Rollout) -> Weights:
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
    one, taken = SendingRank(options), StreamedWeights(options.sender)

    def send(names: list[str]) -> Metrics | None:
        taken.take(exported(weights))
        return one.send(taken, names)

    return Ends(stack, [one], [send], options, **more)


@pytest.mark.parametrize("link", LINKS)
def test_a_rollout_is_given_all_weights_and_is_sent_what_changed(link: str) -> None:
    if link == "nccl":
        torch.cuda.set_device(0)
    weights = weights_on("cuda:0" if link in ("cuda_ipc", "nccl") else "cpu")
    with ExitStack() as stack:
        here = trainer(stack, weights, link)
        for step in range(3):
            metrics, (found,) = here.update()
            assert_same(found, weights)
            assert metrics is not None
            assert metrics["checkpoint_engine/full_synced"] == (step == 0)
            assert step == 0 or metrics["checkpoint_engine/changed_elems"] == 8
            weights["a"][step, ::9] += 1


def test_an_update_that_reached_one_of_two_is_an_error_and_the_next_covers_it() -> None:
    weights = weights_on()
    before = weights["a"].clone()
    with ExitStack() as stack:
        here = trainer(stack, weights, rollouts=2, timeout_s=4.0)
        here.update()
        weights["a"][2, 3] += 1
        with pytest.raises(SyncAborted, match="1 of 2"):
            here.update(here.rollouts[:1])
        weights["a"].copy_(before)  # which the second worker never knew to be otherwise
        for found in here.update()[1]:
            assert_same(found, weights)
        with pytest.raises(TransportTimeout):  # nobody has joined another trainer in time
            trainer(stack, weights, timeout_s=0.2).update([])


def test_a_load_of_an_update_that_was_given_up_gets_nothing() -> None:
    """Neither from its beginning nor from its middle."""
    with ExitStack() as stack:
        here = trainer(stack, weights_on())
        (rollout,) = here.rollouts
        rollout.prepare()
        late = rollout.weights()
        rollout.prepare()
        with pytest.raises(SyncAborted, match="given up"):
            asyncio.run(drain(late))

        async def interrupted(rollout: Rollout) -> Weights:
            given = rollout.weights()
            await anext(given)
            rollout.prepare()
            return await drain(given)

        with pytest.raises(SyncAborted, match="given up"):
            here.update(load=interrupted)


class Held:
    """The rows of a tensor that one of two ranks holds."""

    def __init__(self, whole: Tensor, rank: int) -> None:
        rows = len(whole) // 2
        offset, size = (rank * rows, 0), (rows, whole.shape[1])
        part = whole[rank * rows : (rank + 1) * rows]
        self._tensors = [NamedTensor(("a",), part, ShardSpec(tuple(whole.shape), offset, size))]

    def tensors(self) -> list[NamedTensor]:
        return self._tensors


@pytest.mark.parametrize("link", ["shared_memory", "gloo"])
def test_every_rank_sends_what_it_holds(link: str) -> None:
    options = options_of(link, wire_dtypes={"*": "bfloat16"})
    whole = torch.randn(40, 30)
    ranks = [SendingRank(options, is_hub=number == 0) for number in range(2)]
    hub = ranks[0].hub
    assert hub is not None

    def sends(number: int) -> Callable[[list[str]], Metrics | None]:
        held = Held(whole, number)
        return lambda names: ranks[number].send(held, names, hub, number, 2)

    with ExitStack() as stack:
        here = Ends(stack, ranks, [sends(number) for number in range(2)], options)
        for changed in (1200, 30, 30):
            metrics, (found,) = here.update()
            assert metrics is not None
            assert metrics["checkpoint_engine/changed_elems"] == changed
            assert_same(found, {"a": whole.bfloat16()})
            whole[20] *= -3
