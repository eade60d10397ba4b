"""Where the elements of a tensor without data come from, through views, copies and joins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Join:
    """Checkpoint tensors, views or joins of them, one after another in a tensor of their own.

    Attributes:
        whole: That tensor.
        dim: Along which.
        parts: With as many dimensions as it has, or one less if they are stacked. Nobody else has
            these objects.
        is_stack: Whether they are.
    """

    whole: Tensor
    dim: int
    parts: tuple[Tensor, ...]
    is_stack: bool

    def split(self, view: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]] | None:
        """A copy of a view to `target` as copies of the parts: (target, source) of each.

        None unless the view is a box of the whole.
        """
        if view.dtype != self.whole.dtype or view.is_neg() or view.is_conj():
            return None
        if view.stride() != self.whole.stride() or view.shape != target.shape:
            return None
        starts, rest = [], int(view.storage_offset())
        for stride in self.whole.stride():
            starts.append(rest // stride)
            rest %= stride
        ends = map(int.__add__, starts, view.shape)
        if not self.whole.is_contiguous() or any(map(int.__gt__, ends, self.whole.shape)):
            return None
        return self._split(starts, target)

    def _split(self, starts: list[int], target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        begin, first = 0, starts[self.dim]
        others = [(n, dim) for dim, n in enumerate(starts) if dim != self.dim]
        for part in self.parts:
            end = begin + (1 if self.is_stack else part.shape[self.dim])
            low, high = max(first, begin), min(first + target.shape[self.dim], end)
            if low < high:
                there = target.narrow(self.dim, low - first, high - low)
                source = part if self.is_stack else part.narrow(self.dim, low - begin, high - low)
                for place, (start, dim) in enumerate(others):
                    own = place if self.is_stack else dim
                    source = source.narrow(own, start, target.shape[dim])
                yield (there.squeeze(self.dim) if self.is_stack else there), source
            begin = end
