"""Where the elements of a tensor without data come from, through views, copies and joins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from deltasync.delta.routes.route import Dims


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a checkpoint tensor in some order: it itself, or a copy of a view of it.

    Attributes:
        name: The checkpoint tensor.
        start: Which of its elements comes first.
        dims: (size, stride in the checkpoint tensor), the outermost first.
    """

    name: str
    start: int
    dims: tuple[tuple[int, int], ...]

    def box(self, view: Tensor, strides: tuple[int, ...]) -> tuple[int, Dims] | None:
        """Start and dimensions of the elements of a view of this storage.

        None if they are no box of the checkpoint tensor.

        Args:
            view: Part of this storage.
            strides: Of the view's dimensions elsewhere.
        """
        if not view.numel():
            return self.start, [(0, 0, 0)]
        if len(self.dims) == 1:  # no dimension of a view can run through more than this one
            own = self.dims[0][1]
            start = self.start + int(view.storage_offset()) * own
            if strides == view.stride() and view.is_contiguous():
                return start, [(view.numel(), own, 1)]
            sizes = zip(view.shape, view.stride(), strides, strict=True)
            return start, [(size, step * own, stride) for size, step, stride in sizes]
        spaces = [prod(size for size, _ in self.dims[n + 1 :]) for n in range(len(self.dims))]
        offset = int(view.storage_offset())
        digits = [
            offset // space % size for space, (size, _) in zip(spaces, self.dims, strict=True)
        ]
        start = self.start + sum(
            digit * stride for digit, (_, stride) in zip(digits, self.dims, strict=True)
        )
        found: Dims = []
        for size, step, stride in zip(view.shape, view.stride(), strides, strict=True):
            dims = self._split(size, step, stride, spaces, digits)
            if dims is None:
                return None
            found += dims
        return start, found

    def _split(
        self, count: int, step: int, stride: int, spaces: list[int], digits: list[int]
    ) -> Dims | None:
        """One dimension of a view, along the dimensions of this storage that it runs through.

        `digits` are how far the view has gone in each of these.
        """
        found: Dims = []
        while count > 1 and step > 0:
            place = next(n for n, space in enumerate(spaces) if space <= step)
            size, source_stride = self.dims[place]
            leap, odd = divmod(step, spaces[place])
            fits = digits[place] + (count - 1) * leap < size
            here = count if fits else size // leap  # else it goes on in the next one outwards
            digits[place] += (here - 1) * leap
            if (
                odd
                or digits[place] >= size
                or (not fits and (here < 2 or size % leap or count % here))
            ):
                return None
            found.insert(0, (here, leap * source_stride, stride))
            count, step, stride = count // here, step * here, stride * here
        return [(count, 0, stride), *found] if count > 1 else found or [(1, 0, stride)]


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
