"""What one does with a sharded trainer without deltasync: everything is gathered first.

*Dense*: shards packed, all-gathered in buckets, handed to all engine ranks, copied from there into
the part that each of them holds. *Gathered sparse*: each trainer rank compares its shards one by
one; indices and values, padded to the longest, are gathered to rank 0, which hands them to all
engine ranks; these apply them through NaN, as they do without deltasync in the other benchmarks.
Neither keeps digests, checks or undo logs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.syncs import baselines
from benchmarks.syncs.exchange import Exchange
from benchmarks.syncs.fused import Fused
from benchmarks.syncs.geometry import Shapes

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class GatheringTrainer:
    """A trainer rank.

    Attributes:
        shards: Flat bits of what it holds of each parameter: an equal number of rows on each rank.
        group: Of all trainer ranks.
    """

    shards: list[Tensor]
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def give_dense(self, exchange: Exchange) -> None:
        """Gather everything, and hand it on as it comes."""
        world = dist.get_world_size(self.group)
        exchange.begin()
        for part in baselines.buckets([world * shard.numel() for shard in self.shards]):
            packed = torch.cat(self.shards[part])
            whole = exchange.room(world * packed.numel(), packed.dtype)
            self._all_gather(whole, packed)
            if self.rank == 0:
                exchange.send(whole)

    def give_sparse(self, base: list[Tensor], exchange: Exchange) -> baselines.Found:
        """Compare with `base`, gather to the first rank, which hands on. What this rank found."""
        found = baselines.find_changes(self.shards, base)
        starts = [self.rank * shard.numel() for shard in self.shards]
        indices = torch.cat([one + at for (one, _), at in zip(found, starts, strict=True)])
        values = torch.cat([bits for _, bits in found])
        counts = torch.tensor([len(bits) for _, bits in found], device=values.device)
        all_counts = counts.new_empty((dist.get_world_size(self.group), len(counts)))
        self._all_gather(all_counts, counts)
        longest = int(all_counts.sum(1).max())
        exchange.begin()
        self._hand_on(all_counts, exchange)
        for one in (indices, values):
            padded = one.new_zeros(longest)
            padded[: len(one)] = one
            self._hand_on(self._gathered_to_first(padded), exchange)
        return found

    def _all_gather(self, whole: Tensor, part: Tensor) -> None:
        with warnings.catch_warnings():  # of another name that torch 2.11 does not have
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_gather_into_tensor(as_bytes(whole), as_bytes(part), group=self.group)

    def _gathered_to_first(self, tensor: Tensor) -> Tensor:
        """Of each rank a row; nothing on the others."""
        world = dist.get_world_size(self.group)
        whole = tensor.new_empty((world if self.rank == 0 else 0, *tensor.shape))
        parts = [as_bytes(row) for row in whole] or None
        dist.gather(as_bytes(tensor), parts, group=self.group, group_dst=0)
        return whole

    def _hand_on(self, tensor: Tensor, exchange: Exchange) -> None:
        if self.rank == 0:
            exchange.give(tensor.view(-1))


@dataclass(frozen=True, slots=True)
class ShardedEngine:
    """An engine rank.

    Attributes:
        model: Its part of the model.
        shapes: Of the whole.
        world: How many trainer ranks there are.
    """

    model: Fused
    shapes: Shapes
    world: int

    def take_dense(self, exchange: Exchange) -> None:
        """Copy what is held here to its place."""
        for pairs in self._pairs(exchange):
            torch._foreach_copy_([live for live, _ in pairs], [given for _, given in pairs])

    def take_sparse(self, exchange: Exchange) -> None:
        """Through full tensors that are NaN where nothing changed."""
        exchange.begin()
        counts = exchange.take(self.world * len(self.shapes), torch.int64)
        by_rank = counts.view(self.world, -1).tolist()
        longest = max(map(sum, by_rank))
        device = next(self.model.parameters()).device  # shared memory may be on another
        indices, values = (
            exchange.take(self.world * longest, dtype).to(device).view(self.world, -1)
            for dtype in (torch.int32, torch.bfloat16)
        )
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.shapes]
        for rank, numbers in enumerate(by_rank):
            rows = (torch.split(row[rank][: sum(numbers)], numbers) for row in (indices, values))
            for number, changes in enumerate(zip(*rows, strict=True)):
                found[number].append(changes)
        changes_of = {
            number: (torch.cat([i for i, _ in parts]), torch.cat([v for _, v in parts]))
            for number, parts in enumerate(found)
            if any(len(i) for i, _ in parts)
        }
        baselines.apply_through_nan(self.model, self.shapes, changes_of)

    def _pairs(self, exchange: Exchange) -> Iterator[Pairs]:
        """(where it is, what was given) of all pieces of a bucket."""
        exchange.begin()
        names, numels = list(self.shapes), [prod(shape) for shape in self.shapes.values()]
        for part in baselines.buckets(numels):
            whole = exchange.take(sum(numels[part]), torch.bfloat16).view(self.world, -1)
            sizes = [numel // self.world for numel in numels[part]]
            pairs: Pairs = []
            for name, rows in zip(names[part], torch.split(whole, sizes, 1), strict=True):
                pairs += self._pieces(name, rows)
            yield pairs

    def _pieces(self, name: str, by_rank: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of one tensor, of which each trainer rank gave some rows."""
        shape = self.shapes[name]
        step, live = shape[0] // self.world, self.model.parts[name]
        dim, start, stop = self.model.cut(name, shape)
        for rank, given in enumerate(by_rank):
            rows, begin = given.view(step, *shape[1:]), rank * step
            if dim == 1:
                yield live[begin : begin + step], rows[:, start:stop]
                continue
            low, high = max(start, begin), min(stop, begin + step)
            if low < high:
                yield live[low - start : high - start], rows[low - begin : high - begin]


def as_bytes(tensor: Tensor) -> Tensor:
    """gloo knows no int16."""
    return tensor.view(-1).view(torch.uint8)
