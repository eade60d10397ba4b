"""What verl's checkpoint engine does at a trainer's rank and at a rollout worker. Needs no verl."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from deltasync.config import network_secret
from deltasync.delta.modes import plain_mode
from deltasync.delta.options import OptionsModel
from deltasync.errors import ConfigError, SyncAborted
from deltasync.observe.environment import subscribe_metrics
from deltasync.store.copied import CopiedTarget
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.options import ReceiverOptions, SenderOptions
from deltasync.sync.protocol.links import CallTimeout
from deltasync.sync.protocol.round import Owner
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.sender import WeightSender, one_call
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import SyncStats, reasons
from deltasync.transports.address import Address, LinkName, listen
from deltasync.transports.base import SendTransport
from deltasync.transports.control.connection import LONGEST_S

Metrics = dict[str, float]
"""Metrics of one sync, as verl logs them."""


class Options(OptionsModel):
    """The `engine_kwargs` of both ends."""

    link: Literal["nccl", "gloo", "cuda_ipc", "shared_memory"] = Field(
        default="gloo", description="what moves weights, from trainers to rollouts"
    )
    host: str = Field(default="", description="of this trainer's rank, as rollouts reach it")
    in_place: bool = Field(
        default=False, description="whether vLLM's workers receive the changes and write them"
    )
    timeout_s: float = Field(
        default=600.0, gt=0, le=LONGEST_S, description="for each wait; covers the trainer's export"
    )
    max_staged_bytes: int = Field(
        default=1 << 30, gt=0, description="memory in each engine's worker, if they write in place"
    )
    sender: SenderOptions = SenderOptions()

    def listen(self, link: LinkName | None = None) -> tuple[SendTransport, Address]:
        """Return a sender of its own, and its address."""
        host = self.host or "127.0.0.1"
        return listen(link or self.link, host=host, secret=network_secret())

    @property
    def device(self) -> torch.device:
        """Where payloads arrive: in host memory, or on the calling thread's GPU."""
        if self.link in ("gloo", "shared_memory"):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


class Rollout:
    """A worker that receives changes into its own copy of the weights, for its inference engine.

    Args:
        options: Of both ends.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._target = CopiedTarget()
        self._receiver: WeightReceiver | None = None
        self._addresses: tuple[Address, ...] = ()
        self._name = _new_name()
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="deltasync-verl")
        self._call: Future[None] | None = None
        self._turn = 0

    def prepare(self) -> str:
        """Begin a sync. Returns the name under which this worker receives."""
        self._turn += 1
        if self._call is not None and not self._call.done():  # of an abandoned update
            self._leave()
        return self._name

    def connect(self, addresses: Sequence[Address], *, members: Collection[str]) -> None:
        """Set the addresses of the trainer's ranks, from which `weights` receives.

        Unless this worker is among the trainer's members, it reconnects.
        """
        if self._receiver is not None and (
            tuple(addresses) != self._addresses or self._name not in members
        ):
            self._receiver.close()
            self._receiver = None
        self._addresses = tuple(addresses)
        subscribe_metrics()

    def weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Receive, then yield (name, tensor) of all weights; do not write to them.

        Raises SyncAborted if another sync has begun since this call.
        """
        return self._received(self._turn)

    def close(self) -> None:
        """Close the connection."""
        self._leave()
        self._calls.shutdown()

    async def _received(self, turn: int) -> AsyncIterator[tuple[str, Tensor]]:
        self._check(turn)
        device = self._options.device
        if self._receiver is None:
            self._receiver = self._joining(device)
        self._call = self._calls.submit(_receive, self._receiver, device, self._options.timeout_s)
        await asyncio.wrap_future(self._call)
        self._check(turn)
        for name, tensor in self._target.tensors.items():
            yield name, _placed(tensor)
            self._check(turn)

    def _joining(self, device: torch.device) -> WeightReceiver:
        if not self._addresses:
            raise ConfigError("no trainer has told where it sends from: call connect first")
        first, *lanes = [a.receiver(device, secret=network_secret()) for a in self._addresses]
        return WeightReceiver(
            self._target,
            first,
            lanes=lanes,
            engine=self._name,
            options=ReceiverOptions(stall_timeout_s=self._options.timeout_s),
        )

    def _check(self, turn: int) -> None:
        if turn != self._turn:
            raise SyncAborted("this update was given up; the next one covers it")

    def _leave(self) -> None:
        """Close the connection. This worker rejoins under another name, by its digests."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._name = None, _new_name()


class SendingRank:
    """A rank of a trainer that compares and sends what it holds: its part, or all weights.

    Args:
        options: Of both ends.
        is_hub: Whether this is rank 0 of several ranks that send.
    """

    def __init__(self, options: Options, *, is_hub: bool = False) -> None:
        self._timeout_s, self._options = options.timeout_s, options.sender
        self._transport, self.address = options.listen()
        self._link: SendTransport | None = None
        self.hub: Address | None = None
        if is_hub:
            self._link, self.hub = options.listen("gloo")
        self._sender: WeightSender | TrainerRank | None = None
        self._owner = _RolloutOwner()

    @property
    def members(self) -> frozenset[str]:
        """Rollouts that hold the last version, as rank 0 knows them."""
        sender = self._sender
        return sender.engines if isinstance(sender, WeightSender) else frozenset()

    def send(
        self,
        source: WeightSource | LocalWeights,
        rollouts: Collection[str],
        hub: Address | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> Metrics | None:
        """Sync these rollouts. Returns the metrics on rank 0, None on others.

        Args:
            source: What this rank holds; that of the first call is kept.
            rollouts: Their names.
            hub: The address at which rank 0 listens for the other ranks.
            rank: This rank.
            world: Number of ranks of the trainer that send.

        Raises SyncAborted if the sync failed on any rank, or a rollout does not hold the version.
        """
        if self._sender is None:
            self._sender = self._begun(source, hub, rank, world)
        if isinstance(self._sender, TrainerRank):
            self._sender.send_weights(timeout_s=self._timeout_s)
            return None
        self._owner.rollouts = frozenset(rollouts)
        return metrics_of(_sent(self._sender, rollouts, self._timeout_s))

    def close(self) -> None:
        """Close every connection."""
        for end in (self._sender or self._transport, self._link):
            if end is not None:
                end.close()

    def _begun(
        self, source: WeightSource | LocalWeights, hub: Address | None, rank: int, world: int
    ) -> WeightSender | TrainerRank:
        if isinstance(source, LocalWeights):  # which has these options
            return WeightSender(source, self._transport, owner=self._owner)
        if self._link is not None:
            group = TrainerGroup(self._link, world)
            return WeightSender(
                source, self._transport, options=self._options, owner=self._owner, group=group
            )
        assert hub is not None
        link = hub.receiver(torch.device("cpu"), secret=network_secret())
        return TrainerRank(
            source, self._transport, link, rank=rank, world=world, options=self._options
        )


class _RolloutOwner(Owner):
    """Lets in the rollouts of the sync under way, and no others."""

    rollouts: frozenset[str] = frozenset()

    def admits(self, engine: str) -> bool:
        return engine in self.rollouts


def metrics_of(stats: SyncStats) -> Metrics:
    """Return what verl logs of a sync."""
    counted: Mapping[str, float] = {
        "changed_ratio": stats.density,
        "changed_elems": stats.nnz,
        "payload_mbytes": (stats.payload_bytes + stats.joined_bytes) / (1 << 20),
        "dense_mbytes": stats.dense_bytes / (1 << 20),
        "full_synced": stats.full_synced,
        "version": stats.version,
        "diff_s": stats.diff_s,
        "transfer_s": stats.transfer_s,
        "commit_s": stats.commit_s,
        "total_s": stats.total_s,
    }
    return {f"checkpoint_engine/{name}": float(value) for name, value in counted.items()}


def _sent(sender: WeightSender, rollouts: Collection[str], timeout_s: float) -> SyncStats:
    """Sync these rollouts. Raises SyncAborted if one of them does not hold the version."""
    with plain_mode(), one_call(sender, CallTimeout(timeout_s)):
        sender.let_go_of_strangers("not retained")
        sender.wait_for_receivers(len(rollouts), timeout_s=timeout_s)
        stats = sender.send_weights(timeout_s=timeout_s)
        if stats.receivers < len(rollouts):
            why = reasons(stats.lost) or "refused"
            raise SyncAborted(
                f"{stats.receivers} of {len(rollouts)} rollout workers hold v{stats.version} "
                f"({why}); the next sync covers the others"
            )
        return stats


def _receive(receiver: WeightReceiver, device: torch.device, timeout_s: float) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        receiver.receive_weights(timeout_s=timeout_s)


def _placed(tensor: Tensor) -> Tensor:
    """The tensor on the inference engine's accelerator, if there is one."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return tensor if here is None else tensor.to(here)


def _new_name() -> str:
    return f"rollout-{uuid.uuid4().hex}"
