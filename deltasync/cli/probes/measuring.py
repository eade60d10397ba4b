"""What `bench` measures: syncs to a second process, by turns of what changed and of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from deltasync import Policy, SenderOptions, SyncStats, WeightSender
from deltasync.cli.probes.follower import followed, make_model
from deltasync.errors import SyncError
from deltasync.transports.address import LinkName

ROUNDS = 5
NUM_STEPS = 2 * (ROUNDS + 1) + 1
_WAYS = SenderOptions(), SenderOptions(policy=Policy(dense_above=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The medians of one quantity, in syncs of what changed and in syncs of everything."""

    changed: float
    everything: float

    @classmethod
    def of(cls, quantity: Callable[[SyncStats], float], *ways: Sequence[SyncStats]) -> Sides:
        """Medians of `quantity` in the syncs of either way."""
        changed, everything = (median(map(quantity, syncs)) for syncs in ways)
        return cls(changed=changed, everything=everything)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run found.

    Attributes:
        device: Where both ends held their weights.
        link: The transport.
        numel: Elements of the model, in bf16.
        nnz: How many of them changed between two syncs.
        payload_bytes: Payload bytes of one sync.
        total_s: Duration of `send_weights`.
        diff_s: The part in which the trainer compares, digests included.
        pause_s: The part in which an engine would not serve.
    """

    device: str
    link: LinkName
    numel: int
    nnz: int
    payload_bytes: Sides
    total_s: Sides
    diff_s: Sides
    pause_s: Sides


def measure(numel: int, density: float, device: str, step: Callable[[], None]) -> Measured:
    """Run the benchmark. Calls `step` after each of its `NUM_STEPS` steps."""
    link: LinkName = "cuda_ipc" if device == "cuda" else "shared_memory"
    changed: list[SyncStats] = []
    everything: list[SyncStats] = []
    module = make_model(numel, device)
    flip = _flip_of(module, density)
    with followed(module, link, devices=(device, device)) as sender:
        step()
        turns = [(changed, _WAYS[0]), (everything, _WAYS[1])]
        for _ in range(ROUNDS + 1):
            turns.reverse()
            for syncs, options in turns:
                flip()
                syncs.append(_sync(sender, options))
                step()
    ways = changed[1:], everything[1:]  # the first of each warms up
    return Measured(
        device=device,
        link=link,
        numel=numel,
        nnz=changed[0].nnz,
        payload_bytes=Sides.of(lambda stats: stats.payload_bytes, *ways),
        total_s=Sides.of(lambda stats: stats.total_s, *ways),
        diff_s=Sides.of(lambda stats: stats.diff_s, *ways),
        pause_s=Sides.of(_pause_s, *ways),
    )


def _flip_of(module: nn.Module, density: float) -> Callable[[], None]:
    """Return what changes a share of the elements by one unit in the last place, and back."""
    parts = []
    for parameter in module.parameters():
        bits = parameter.detach().view(torch.int16)
        generator = torch.Generator(bits.device).manual_seed(1)
        chances = torch.rand(bits.numel(), device=bits.device, generator=generator)
        parts.append((bits, (chances < density).nonzero().squeeze(1)))

    def flip() -> None:
        for bits, positions in parts:
            bits.scatter_(0, positions, bits.index_select(0, positions) ^ 1)

    return flip


def _sync(sender: WeightSender, options: SenderOptions) -> SyncStats:
    sender.options = options
    stats = sender.send_weights()
    if stats.lost:
        raise SyncError(f"the second process left: {stats.lost}")
    return stats


def _pause_s(stats: SyncStats) -> float:
    """The pause: a sync that is not staged is written as it arrives, so its transfer counts."""
    was_staged = stats.receiver_bytes > 0
    return stats.commit_s + (0.0 if was_staged else stats.transfer_s)
