"""What verl's trainer and rollouts do in a sync, against sending the same bytes and no more.

Both ends are those that the checkpoint engine `deltasync` is made of, in a process each, without
Ray and without an inference engine. Baselines are the transport alone, where payloads of the same
size are filled from the trainer's weights, sent, and copied out where they arrive; and a sync of
the same changes between a `WeightSender` of tensors that stay where they are and a receiver.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import Trainer as Source
from benchmarks.record import MEMORY, SLOW_DOWN, Result, compared
from benchmarks.syncs.cases import timed
from benchmarks.syncs.group import Group
from deltasync import SenderOptions, WeightReceiver, WeightSender
from deltasync.integrations.verl_ends import Metrics, Options, Rollout, SendingRank
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import collective
from deltasync.transports.address import Address
from deltasync.transports.base import Frame

_SIZES = {"full": (512 << 20, 5), "quick": (64 << 20, 3), "tiny": (1 << 20, 2)}
"""Elements of the model, bf16, and how often each way takes its turn."""
_BUCKET_BYTES = 64 << 20
_WAYS = {"dense": 1.0, "sparse": 0.01}  # shares of changed elements
_TENSOR_NUMEL = 16 << 20
_DENSE_GOAL, _SPARSE_GOAL = 1.15, 0.1
_TIMEOUT_S = 300.0
_SENDER = SenderOptions(snapshot_device="cpu", bucket_bytes=_BUCKET_BYTES)
_OPTIONS = Options(host="127.0.0.1", timeout_s=_TIMEOUT_S, sender=_SENDER)


class _Trainer:
    """The first rank."""

    def __init__(self, group: Group, numel: int) -> None:
        each = min(numel, _TENSOR_NUMEL)
        self.group = group
        self.weights = {
            f"layers.{n}.weight": torch.randn(each).bfloat16() for n in range(numel // each)
        }
        self._trainer, self._taken = SendingRank(_OPTIONS), StreamedWeights(_SENDER)
        self._metrics: Metrics | None = None
        self._link, plain = collective.Sender(), collective.Sender()
        self._sender = WeightSender(Source(self.weights), plain, options=_SENDER)
        group.told([_address(self._link), _address(plain)])
        ((peer, _),) = self._link.poll(timeout_s=_TIMEOUT_S)
        self._link.open_epoch([peer], timeout_s=_TIMEOUT_S)

    def bare(self) -> None:
        """The transport alone."""
        for piece in _pieces(self.weights.values()):
            payload = self._link.buffer(len(piece), timeout_s=_TIMEOUT_S)
            payload.copy_(piece)
            self._link.send(Frame(b"x", payload), timeout_s=_TIMEOUT_S)
        self._link.collect_replies(timeout_s=_TIMEOUT_S)

    def plain(self) -> None:
        """A sync of the weights where they are."""
        self._sender.wait_for_receivers(1, timeout_s=_TIMEOUT_S)
        self._sender.send_weights(timeout_s=_TIMEOUT_S)

    def update(self) -> None:
        """One sync, as verl does it."""
        name = self.group.told(None)[1]
        address = self._trainer.address.model_dump(mode="json")
        self.group.told([address, sorted(self._trainer.members)])
        self._taken.take(self.weights.items())
        self._metrics = self._trainer.send(self._taken, [name])

    def flip(self, share: float) -> None:
        """Change a bit of a share of the elements."""
        for tensor in self.weights.values():
            tensor.view(torch.int16)[:: round(1 / share)] ^= 1

    def found(self) -> dict[str, float]:
        """What the last update counted."""
        assert self._metrics is not None
        return {name.split("/")[1]: value for name, value in self._metrics.items()}

    def close(self) -> None:
        self._sender.close()
        self._trainer.close()


class _Rollout:
    """The other rank."""

    def __init__(self, group: Group, numel: int) -> None:
        self.group, self._rollout = group, Rollout(_OPTIONS)
        self._memory = torch.zeros(2 * numel, dtype=torch.uint8)
        device = torch.device("cpu")
        self._link, plain = (Address(**one).receiver(device) for one in group.told(None)[0])
        self._link.connect(b"x", timeout_s=_TIMEOUT_S)
        self._receiver = WeightReceiver(CopiedTarget(), plain)

    def bare(self) -> None:
        begin = 0
        while begin < len(self._memory):
            payload = self._link.receive(timeout_s=_TIMEOUT_S).payload
            assert payload is not None
            self._link.progress()
            self._memory[begin : begin + len(payload)].copy_(payload)
            begin += len(payload)
        self._link.reply(b"x", timeout_s=_TIMEOUT_S)

    def plain(self) -> None:
        self._receiver.receive_weights(timeout_s=_TIMEOUT_S)

    def update(self) -> None:
        self.group.told(self._rollout.prepare())
        address, members = self.group.told(None)[0]
        self._rollout.connect([Address(**address)], members=members)
        asyncio.run(self._take())

    async def _take(self) -> None:
        async for _ in self._rollout.weights():
            pass

    def flip(self, share: float) -> None:
        """That is the trainer's."""

    def close(self) -> None:
        self._receiver.close()


def verl(group: Group) -> Iterator[Result]:
    """All records."""
    numel, rounds = _SIZES[group.plan.scale]
    seconds: dict[str, list[float]] = defaultdict(list)
    found: dict[str, dict[str, float]] = {}
    make: Any = _Trainer if group.is_trainer else _Rollout
    with closing(make(group, numel)) as end:
        for work in (end.plain, end.bare, end.update):  # buffers grow
            timed(group, work)
        for _ in range(rounds):
            seconds["bare"].append(timed(group, end.bare, until_all=True))
            for way, share in _WAYS.items():
                end.flip(share)
                seconds[f"plain {way}"].append(timed(group, end.plain, until_all=True))
                seconds[way].append(timed(group, end.update, until_all=True))
                if group.rank == 0:
                    found[way] = end.found()
        if group.rank == 0:
            yield from _results(numel, len(end.weights), seconds, found)
        group.meet()


def _results(
    numel: int,
    parameters: int,
    seconds: dict[str, list[float]],
    found: dict[str, dict[str, float]],
) -> Iterator[Result]:
    common = {"numel": numel, "parameters": parameters, "link": "gloo", "model": "bf16"}
    for way, share in _WAYS.items():
        counted = found[way]
        parts = {key: counted[key] for key in ("diff_s", "transfer_s", "commit_s")}
        sent, every = (int(counted[key] * (1 << 20)) for key in ("payload_mbytes", "dense_mbytes"))
        changed = int(counted["changed_elems"])
        measured: dict[str, Any] = common | {"density": share, "changed": changed, "parts": parts}
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


def _address(link: collective.Sender) -> dict[str, Any]:
    address = Address.of(link)
    assert address is not None
    return address.model_dump(mode="json")


def _pieces(tensors: Any) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from torch.split(tensor.view(torch.uint8), _BUCKET_BYTES)
