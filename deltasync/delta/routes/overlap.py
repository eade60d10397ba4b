"""Which tensors share bytes of memory, decided on their elements, whatever their strides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

if TYPE_CHECKING:
    from deltasync.delta.bits import Live

_MAX_WORK = 100_000  # of numpy's search, some milliseconds; beyond that bytes are marked


@dataclass(frozen=True, slots=True)
class _Span:
    """Elements at regular distances, in bytes.

    Attributes:
        begin, end: The first byte, and the one after the last.
        item_size: Of an element.
        shape, strides: Of the elements; none of them is empty.
        name: Of the tensor.
    """

    begin: int
    end: int
    item_size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    name: str = ""

    @classmethod
    def of(
        cls, address: int, item_size: int, dims: Iterable[tuple[int, int]], name: str = ""
    ) -> _Span:
        """From the address of the first element, and (size, stride in elements) of each dim."""
        sizes = [(size, stride * item_size) for size, stride in dims]
        end = address + item_size + sum((size - 1) * stride for size, stride in sizes)
        shape, strides = zip(*sizes, strict=True) if sizes else ((), ())
        return cls(address, end, item_size, shape, strides, name)

    def array(self) -> Any:
        """What numpy takes for an array there. Nobody reads it: it may be memory of a GPU."""
        return np.asarray(_Described(self))


class _Described:
    def __init__(self, span: _Span) -> None:
        self.__array_interface__ = {
            "data": (span.begin, True),
            "shape": span.shape,
            "strides": span.strides,
            "typestr": f"|V{span.item_size}",
            "version": 3,
        }


def overlapping(held: Iterable[tuple[str, Live]]) -> tuple[str, str] | None:
    """The names of two that share a byte, or None. A name stands twice if it is one tensor.

    Contiguous tensors cost a place in a sort. Only those are looked at closely whose elements lie
    between those of others.
    """
    spans = [
        _Span.of(box.address, live.dtype.item_size, [(n, s) for n, _, s in box.dims], name)
        for name, live in held
        for box in live.boxes()
    ]
    reaching: list[_Span] = []
    for span in sorted(spans, key=attrgetter("begin")):
        reaching = [other for other in reaching if other.end > span.begin]
        for other in reaching:
            if _share(other, span):
                return other.name, span.name
        reaching.append(span)
    return None


def repeats(tensor: Tensor) -> bool:
    """Whether two elements of a tensor are the same bytes."""
    if not tensor.numel():
        return False
    dims = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    address, item_size = tensor.data_ptr(), tensor.element_size()
    # Two elements differ in a first dimension: by some steps there, by any number in later ones.
    for place, (size, stride) in enumerate(dims):
        later = dims[place + 1 :]
        one = _Span.of(address, item_size, later)
        other = _Span.of(address + stride * item_size, item_size, [(size - 1, stride), *later])
        if _share(one, other):
            return True
    return False


def _share(one: _Span, other: _Span) -> bool:
    try:
        return np.shares_memory(one.array(), other.array(), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return _share_marks(one, other)


def _share_marks(one: _Span, other: _Span) -> bool:
    """The same by a mark on each byte."""
    begin = min(one.begin, other.begin)
    marks = np.zeros(max(one.end, other.end) - begin, np.bool_)
    views = [
        as_strided(
            marks[span.begin - begin :],
            (*span.shape, span.item_size),
            (*span.strides, 1),
        )
        for span in (one, other)
    ]
    views[0][...] = True
    return bool(views[1].any())
