"""What verl's trainer and rollouts do in a sync, against sending the same bytes and no more.

Both ends are those that the checkpoint engine `deltasync` is made of, in a process each, without
Ray and without an inference engine. Baselines are the transport alone, where payloads of the same
size are filled from the trainer's weights, sent, and copied out where they arrive; and a sync of
the same changes between a `WeightSender` of tensors that stay where they are and a receiver.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.engines import Trainer as Source
from benchmarks.processes import Told
from benchmarks.record import MEMORY, SLOW_DOWN, Result, compared
from deltasync import SenderOptions, WeightReceiver, WeightSender
from deltasync.integrations.verl_ends import Metrics, Options, Rollout, Trainer
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import collective
from deltasync.transports.address import Address
from deltasync.transports.base import Frame

BUCKET_BYTES = 64 << 20
_WAYS = {"dense": 1.0, "sparse": 0.01}  # shares of changed elements
_TENSOR_NUMEL = 16 << 20
_DENSE_GOAL, _SPARSE_GOAL = 1.15, 0.1
_TIMEOUT_S = 300.0
_OPTIONS = Options(host="127.0.0.1", timeout_s=_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class VerlPlan:
    """What a run measures.

    Attributes:
        numel: Elements of the model, bf16.
        rounds: Times that each way takes its turn.
    """

    numel: int
    rounds: int

    @classmethod
    def choose(cls, scale: str) -> Self:
        """For "full" (1 GiB), "quick" or "tiny"."""
        sizes = {"full": (512 << 20, 5), "quick": (64 << 20, 3), "tiny": (1 << 20, 2)}
        return cls(*sizes[scale])

    def weights(self) -> dict[str, Tensor]:
        """Tensors of 32 MiB, or one that is smaller."""
        each = min(self.numel, _TENSOR_NUMEL)
        return {
            f"layers.{n}.weight": torch.randn(each).bfloat16() for n in range(self.numel // each)
        }


def run(plan: VerlPlan) -> Iterator[Result]:
    """All records, as they come."""
    torch.set_num_threads(1)
    weights = plan.weights()
    sizes = SenderOptions(snapshot_device="cpu", bucket_bytes=BUCKET_BYTES)
    seconds: dict[str, list[float]] = defaultdict(list)
    found: dict[str, Metrics] = {}
    with (
        _worker() as worker,
        closing(Trainer(_OPTIONS, sizes)) as trainer,
        collective.Sender() as link,
        closing(_Plain(worker, weights, sizes)) as plain,
    ):
        _join(worker, link)
        _bare(worker, link, weights)  # buffers grow
        _update(worker, trainer, weights)
        for _ in range(plan.rounds):
            seconds["bare"].append(_bare(worker, link, weights))
            for way, share in _WAYS.items():
                _flip(weights, share)
                seconds[f"plain {way}"].append(plain.sync())
                began = time.perf_counter()
                found[way] = _update(worker, trainer, weights)
                seconds[way].append(time.perf_counter() - began)
    yield from _results(plan, weights, seconds, found)


def _results(
    plan: VerlPlan,
    weights: dict[str, Tensor],
    seconds: dict[str, list[float]],
    found: dict[str, Metrics],
) -> Iterator[Result]:
    common: dict[str, Any] = {
        "numel": plan.numel,
        "parameters": len(weights),
        "link": "gloo",
        "model": "bf16",
    }
    for way, share in _WAYS.items():
        counted = {name.split("/")[1]: value for name, value in found[way].items()}
        parts = {key: counted[key] for key in ("diff_s", "transfer_s", "commit_s")}
        sent, every = (int(counted[key] * (1 << 20)) for key in ("payload_mbytes", "dense_mbytes"))
        changed = int(counted["changed_elems"])
        measured = common | {"density": share, "changed": changed, "parts": parts}
        for case, baseline, name in (
            ("verl_over_bare", "bare", "the transport alone, sending everything"),
            ("verl_over_sync", f"plain {way}", "WeightSender.send_weights"),
        ):
            yield compared(
                case=case,
                samples=seconds[way],
                baseline_samples=seconds[baseline],
                baseline=name,
                ratio_is=SLOW_DOWN,
                goal=_DENSE_GOAL if way == "dense" else None,
                bytes=sent,
                **measured,
            )
    bound = int(_SPARSE_GOAL * every)
    yield Result(
        case="verl_bytes",
        seconds=seconds["sparse"][-1],
        samples=tuple(seconds["sparse"]),
        ratio=sent / bound,
        ratio_is=MEMORY,
        goal=1.0,
        met=sent <= bound,
        bytes=sent,
        bound_bytes=bound,
        **measured,
    )


class _Plain:
    """A sender of the same weights, where they are."""

    def __init__(self, worker: Told, weights: dict[str, Tensor], sizes: SenderOptions) -> None:
        link = collective.Sender()
        self._worker = worker
        self._sender = WeightSender(Source(weights), link, options=sizes)
        worker.say({"what": "follow", "address": _told(link)})
        self.sync()

    def sync(self) -> float:
        """Seconds of a sync."""
        self._worker.say({"what": "receive"})
        self._sender.wait_for_receivers(1, timeout_s=_TIMEOUT_S)
        began = time.perf_counter()
        self._sender.send_weights(timeout_s=_TIMEOUT_S)
        self._worker.answer()
        return time.perf_counter() - began

    def close(self) -> None:
        self._sender.close()


def _told(link: collective.Sender) -> dict[str, Any]:
    address = Address.of(link)
    assert address is not None
    return address.model_dump(mode="json")


def _join(worker: Told, link: collective.Sender) -> None:
    worker.say({"what": "join", "address": _told(link)})
    ((peer, _),) = link.poll(timeout_s=_TIMEOUT_S)
    link.open_epoch([peer], timeout_s=_TIMEOUT_S)


def _bare(worker: Told, link: collective.Sender, weights: dict[str, Tensor]) -> float:
    """Seconds of moving all weights."""
    pieces = [p for t in weights.values() for p in _pieces(t.view(torch.uint8))]
    num_bytes = sum(map(len, pieces))
    worker.say({"what": "take", "frames": len(pieces), "num_bytes": num_bytes})
    began = time.perf_counter()
    for piece in pieces:
        payload = link.buffer(len(piece), timeout_s=_TIMEOUT_S)
        payload.copy_(piece)
        link.send(Frame(b"x", payload), timeout_s=_TIMEOUT_S)
    link.collect_replies(timeout_s=_TIMEOUT_S)
    return time.perf_counter() - began


def _pieces(line: Tensor) -> Iterator[Tensor]:
    for begin in range(0, len(line), BUCKET_BYTES):
        yield line[begin : begin + BUCKET_BYTES]


def _update(worker: Told, trainer: Trainer, weights: dict[str, Tensor]) -> Metrics:
    """One sync, until the rollout has handed over what changed."""
    worker.say({"what": "prepare"})
    name = worker.answer()
    address = trainer.address.model_dump(mode="json")
    worker.say({"what": "update", "address": address, "members": sorted(trainer.members)})
    metrics = trainer.send(weights.items(), [name])
    worker.answer()
    return metrics


def _flip(weights: dict[str, Tensor], share: float) -> None:
    """Change a bit of a share of the elements."""
    step = round(1 / share)
    for tensor in weights.values():
        tensor.view(torch.int16)[::step] ^= 1


@contextmanager
def _worker() -> Iterator[Told]:
    worker = Told("benchmarks.verl")
    try:
        yield worker
        worker.end()
    finally:
        worker.bury()


class _Rollout:
    """What the rollout's process does when it is asked to."""

    def __init__(self) -> None:
        self.rollout = Rollout(_OPTIONS)
        self.memory = torch.empty(0, dtype=torch.uint8)

    def prepare(self) -> object:
        return self.rollout.prepare()

    def update(self, address: dict[str, Any], members: list[str]) -> object:
        self.rollout.connect([Address(**address)], members=members)
        return asyncio.run(self._taken())

    async def _taken(self) -> int:
        taken = 0
        async for _, tensor in self.rollout.weights():
            taken += tensor.nbytes
        self.rollout.confirm()
        return taken

    def follow(self, address: dict[str, Any]) -> None:
        link = Address(**address).receiver(torch.device("cpu"))
        self.receiver = WeightReceiver(CopiedTarget(), link)

    def receive(self) -> object:
        return self.receiver.receive_weights(timeout_s=_TIMEOUT_S)

    def join(self, address: dict[str, Any]) -> None:
        self.link = Address(**address).receiver(torch.device("cpu"))
        self.link.connect(b"x", timeout_s=_TIMEOUT_S)

    def take(self, frames: int, num_bytes: int) -> None:
        if len(self.memory) < num_bytes:
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        begin = 0
        for _ in range(frames):
            payload = self.link.receive(timeout_s=_TIMEOUT_S).payload
            assert payload is not None
            self.link.progress()
            self.memory[begin : begin + len(payload)].copy_(payload)
            begin += len(payload)
        self.link.reply(b"x", timeout_s=_TIMEOUT_S)


def _serve() -> None:
    torch.set_num_threads(1)
    here = _Rollout()
    tasks = (here.prepare, here.update, here.follow, here.receive, here.join, here.take)
    by_name: dict[str, Any] = {task.__name__: task for task in tasks}
    for line in sys.stdin:
        order = json.loads(line)
        answer = by_name[order.pop("what")](**order)
        if answer is not None:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
