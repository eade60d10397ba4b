"""What one does without deltasync, as inference stacks do it: dense, or sparse the usual way.

*Dense*: all weights packed into flat buffers, each broadcast, then copied into the parameters.
*Usual sparse*: `nonzero` on each parameter; its indices and its values broadcast, two calls a
parameter; at the engine a full tensor of NaN, the values written into it, and the model's own
loader with a copy that leaves out what is NaN. None of it keeps digests, checks or undo logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.syncs.exchange import Exchange
from benchmarks.syncs.fused import Fused
from benchmarks.syncs.geometry import Shapes

BUCKET_NUMEL = 2 << 30  # 4 GiB: the 1.7B model travels as one buffer
_STAGED_NUMEL = 256 << 20  # 512 MiB of NaN at a time
Found = list[tuple[Tensor, Tensor]]
"""(int32 indices, values) of each parameter's changes."""


def buckets(numels: Sequence[int], limit: int = BUCKET_NUMEL) -> Iterator[slice]:
    """Runs of parameters that are packed together; a larger parameter travels alone."""
    start, total = 0, 0
    for number, numel in enumerate(numels):
        if number > start and total + numel > limit:
            yield slice(start, number)
            start, total = number, 0
        total += numel
    if numels:
        yield slice(start, len(numels))


def give_dense(weights: Sequence[Tensor], exchange: Exchange) -> None:
    """Pack and send flat tensors."""
    exchange.begin()
    for part in buckets([w.numel() for w in weights]):
        exchange.give(*weights[part])


def take_dense(weights: Sequence[Tensor], exchange: Exchange) -> None:
    """Receive into tensors of any shape."""
    exchange.begin()
    for part, flat in _taken(weights, exchange):
        pieces = torch.split(flat, [w.numel() for w in weights[part]])
        shaped = [p.view_as(w) for p, w in zip(pieces, weights[part], strict=True)]
        torch._foreach_copy_(list(weights[part]), shaped)


def differing(weights: Sequence[Tensor], exchange: Exchange) -> int:
    """How many of these tensors are not, bit for bit, what `give_dense` sends."""
    exchange.begin()
    wrong = 0
    for part, flat in _taken(weights, exchange):
        pieces = torch.split(flat, [w.numel() for w in weights[part]])
        for piece, held in zip(pieces, weights[part], strict=True):
            same = torch.equal(piece.view(torch.uint8), held.reshape(-1).view(torch.uint8))
            wrong += not same
    return wrong


def _taken(weights: Sequence[Tensor], exchange: Exchange) -> Iterator[tuple[slice, Tensor]]:
    numels = [w.numel() for w in weights]
    for part in buckets(numels):
        yield part, exchange.take(sum(numels[part]), weights[part.start].dtype)


def find_changes(new: Sequence[Tensor], old: Sequence[Tensor]) -> Found:
    """Compare flat int16 tensors one by one: the host waits once for each."""
    found = []
    for now, base in zip(new, old, strict=True):
        indices = (now != base).nonzero().squeeze(1)
        found.append((indices.int(), now[indices]))
    return found


def advance(old: Sequence[Tensor], found: Found) -> None:
    """The snapshot becomes what was sent."""
    for base, (indices, values) in zip(old, found, strict=True):
        base[indices.long()] = values


def give_sparse(found: Found, exchange: Exchange) -> None:
    """How many changed of each parameter, then two transfers for each that did."""
    exchange.begin()
    counts = [len(indices) for indices, _ in found]
    exchange.give(torch.tensor(counts, device=found[0][0].device))
    for indices, values in found:
        if len(indices):
            exchange.give(indices)
            exchange.give(values)


def take_sparse(num_parameters: int, exchange: Exchange) -> dict[int, tuple[Tensor, Tensor]]:
    """(int32 indices, bf16 values) by parameter, of those that changed."""
    exchange.begin()
    counts = exchange.take(num_parameters, torch.int64).tolist()
    return {
        number: (exchange.take(count, torch.int32), exchange.take(count, torch.bfloat16))
        for number, count in enumerate(counts)
        if count
    }


def apply_through_nan(
    model: Fused, shapes: Shapes, changes: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Stage full tensors that are NaN where nothing changed, and load them masked."""
    names = list(shapes)
    staged: list[tuple[str, Tensor]] = []
    numel = 0
    with _masked_copies():
        for number, (indices, values) in changes.items():
            shape = shapes[names[number]]
            weight = torch.full(shape, torch.nan, dtype=values.dtype, device=values.device)
            weight.view(-1).index_copy_(0, indices.long(), values)
            staged.append((names[number], weight))
            numel += weight.numel()
            if numel >= _STAGED_NUMEL:
                model.load_weights(iter(staged))
                staged, numel = [], 0
        model.load_weights(iter(staged))


@contextmanager
def _masked_copies() -> Iterator[None]:
    """`Tensor.copy_` keeps what is there where the source is NaN."""
    original = torch.Tensor.copy_

    def copy_unless_nan(self: Tensor, source: Tensor) -> Tensor:
        return torch.where(torch.isnan(source), self, source, out=self)

    torch.Tensor.copy_ = copy_unless_nan  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]
