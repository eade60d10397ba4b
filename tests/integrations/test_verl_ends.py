"""What verl's checkpoint engine does at both ends, over every link; tests/verl has verl itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from deltasync import NamedTensor, SenderOptions, ShardSpec
from deltasync.delta.bits import as_bits
from deltasync.errors import SyncAborted
from deltasync.integrations.verl_ends import Metrics, Options, Rollout, SendingRank, Trainer

Weights = dict[str, Tensor]
LINKS = [
    "shared_memory",
    "gloo",
    pytest.param("cuda_ipc", marks=pytest.mark.gpu),
    pytest.param("nccl", marks=pytest.mark.multigpu),
]


def options_of(link: Literal["nccl", "gloo", "cuda_ipc", "shared_memory"]) -> Options:
    return Options(link=link, host="127.0.0.1", timeout_s=30.0)


def weights_on(device: str) -> Weights:
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


@pytest.mark.parametrize("link", LINKS)
def test_a_rollout_is_given_what_it_does_not_have(link: Any) -> None:
    on_gpu = link in ("cuda_ipc", "nccl")
    options = options_of(link)
    if link == "nccl":
        torch.cuda.set_device(0)
    weights = weights_on("cuda:0" if on_gpu else "cpu")
    trainer = Trainer(options, SenderOptions(snapshot_device="cpu", bucket_bytes=4096))
    rollout = Rollout(options)

    def receive() -> Weights:
        if link == "nccl":
            torch.cuda.set_device(1)
        rollout.connect([trainer.address], members=trainer.members)
        return asyncio.run(taken(rollout))

    def update() -> tuple[Metrics, Weights]:
        name = rollout.prepare()
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(receive)
            return trainer.send(exported(weights), [name]), receiving.result()

    with closing(trainer), closing(rollout):
        metrics, found = update()
        assert_same(found, weights)
        assert metrics["checkpoint_engine/full_synced"] == 1
        for step in range(3):
            weights["a"][step, ::9] += 1
            metrics, found = update()
            assert_same(found, {"a": weights["a"]})
            assert metrics["checkpoint_engine/changed_elems"] == 8
        assert update()[1] == {}
        rollout.forget()
        assert_same(update()[1], weights)


def test_workers_of_an_engine_are_given_the_same_after_an_update_that_reached_one_of_them() -> None:
    options = Options(link="shared_memory", timeout_s=6.0)
    weights = weights_on("cpu")
    before = weights["a"].clone()
    trainer = Trainer(options, SenderOptions(bucket_bytes=4096))
    workers = [Rollout(options), Rollout(options)]

    def update(present: list[Rollout]) -> list[Weights]:
        names = [worker.prepare() for worker in workers]
        for worker in workers:
            worker.connect([trainer.address], members=trainer.members)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(asyncio.run, drained(worker)) for worker in present]
            trainer.send(exported(weights), names)
        for worker in workers:
            worker.confirm()
        return [call.result() for call in calls]

    with closing(trainer), closing(workers[0]), closing(workers[1]):
        update(workers)
        weights["a"][2, 3] += 1
        with pytest.raises(SyncAborted, match="1 of 2"):
            update(workers[:1])
        weights["a"].copy_(before)  # which the second worker never knew to be otherwise
        first, second = update(workers)
        assert_same(first, weights)
        assert_same(second, weights)
        assert update(workers) == [{}, {}]


def test_a_load_that_begins_when_its_update_was_given_up_gets_nothing() -> None:
    with closing(Rollout(options_of("shared_memory"))) as rollout:
        rollout.prepare()
        late = rollout.weights()
        rollout.prepare()
        with pytest.raises(SyncAborted, match="given up"):
            asyncio.run(drain(late))


@pytest.mark.parametrize("has_all", [False, True])
def test_weights_that_are_lost_during_a_load_are_given_again(has_all: bool) -> None:
    options, weights = options_of("shared_memory"), weights_on("cpu")
    trainer, rollout = Trainer(options, SenderOptions()), Rollout(options)

    async def interrupted() -> None:
        given = rollout.weights()
        await anext(given)
        if not has_all:
            rollout.forget()
            with pytest.raises(SyncAborted, match="given up"):
                await drain(given)
        else:
            await drain(given)
            rollout.forget()
        rollout.confirm()

    def update(load: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        name = rollout.prepare()
        rollout.connect([trainer.address], members=trainer.members)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(asyncio.run, load())
            trainer.send(exported(weights), [name])
            return call.result()

    with closing(trainer), closing(rollout):
        update(interrupted)
        assert_same(update(lambda: taken(rollout)), weights)


class Half:
    """The rows that one of two ranks holds."""

    def __init__(self, weights: Weights, rank: int) -> None:
        whole = weights["a"]
        rows = len(whole) // 2
        offset, size = (rank * rows, 0), (rows, whole.shape[1])
        part = whole[rank * rows : (rank + 1) * rows]
        self._tensors = [NamedTensor(("a",), part, ShardSpec(tuple(whole.shape), offset, size))]

    def tensors(self) -> list[NamedTensor]:
        return self._tensors


@pytest.mark.parametrize("link", ["shared_memory", "gloo"])
def test_every_rank_sends_what_it_holds(link: Any) -> None:
    options, sizes = options_of(link), SenderOptions(wire_dtypes={"*": "bfloat16"})
    weights = {"a": torch.randn(40, 30)}
    ranks = [SendingRank(options, sizes, is_master=number == 0) for number in range(2)]
    rollout, hub = Rollout(options), ranks[0].hub
    assert hub is not None

    def receive() -> Weights:
        rollout.connect([rank.address for rank in ranks], members=ranks[0].members)
        return asyncio.run(taken(rollout))

    with ExitStack() as stack:
        stack.callback(rollout.close)
        for rank in ranks:
            stack.callback(rank.close)
        for changed in (1200, 30, 30):
            name = rollout.prepare()
            with ThreadPoolExecutor(3) as pool:
                receiving = pool.submit(receive)
                sends = [
                    pool.submit(rank.send, Half(weights, number), [name], hub, number, 2)
                    for number, rank in enumerate(ranks)
                ]
                metrics, nothing = [send.result() for send in sends]
            assert nothing is None
            assert metrics is not None
            assert metrics["checkpoint_engine/changed_elems"] == changed
            assert_same(receiving.result(), {"a": weights["a"].bfloat16()})
            weights["a"][20] *= -3


class Tied:
    """A model whose head is its embedding, as `from_pretrained` lists them."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensors = [NamedTensor(("lm_head", "embed"), tensor)]

    def tensors(self) -> list[NamedTensor]:
        return self._tensors


def test_a_tied_tensor_is_handed_over_under_each_of_its_names() -> None:
    options, tensor = options_of("shared_memory"), torch.randn(40, 30)
    rank, rollout = SendingRank(options, SenderOptions(), is_master=True), Rollout(options)
    assert rank.hub is not None

    def receive() -> Weights:
        rollout.connect([rank.address], members=rank.members)
        return asyncio.run(taken(rollout))

    with closing(rank), closing(rollout), ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            name = rollout.prepare()
            receiving = pool.submit(receive)
            rank.send(Tied(tensor), [name], rank.hub, 0, 1)
            assert_same(receiving.result(), {"lm_head": tensor, "embed": tensor})
            tensor[3] += 1
