"""Tensors as flat runs of integers: how bits are compared and moved, never as floats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deltasync import dtypes
from deltasync.delta.modes import in_plain_mode, writable
from deltasync.delta.region import Region
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError

_POSITIONS = 1 << 20  # that are looked at together: some 60 bytes for each
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type that carries the bits of elements of so many bytes."""

_TORCH = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "complex64": torch.complex64,
}
_DTYPES = {torch_name: dtypes.BY_NAME[name] for name, torch_name in _TORCH.items()}


def dtype_of(tensor: Tensor, *, name: str = "tensor") -> Dtype:
    """The dtype's entry in the closed table. Raises ConfigError for one that is not there."""
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        known = f"one of {sorted(_TORCH)} can"
        raise ConfigError(f"{name}: {tensor.dtype} cannot be sent; {known}") from None


def refuse_part(name: str, held: Sequence[int]) -> NoReturn:
    """Raise ConfigError for a parameter of which a rank holds what is no part of its shape."""
    raise ConfigError(
        f"{name}: {tuple(held)} is held here, which ZeRO-3 or FSDP1 leaves of a parameter: gather "
        "all (deepspeed.zero.GatheredParameters, FSDP.summon_full_params), or shard with FSDP2"
    )


def check_plain(tensor: Tensor, name: str) -> None:
    """Raises ConfigError, by name, for a tensor whose elements do not lie in memory by strides."""
    if (oddity := _oddity(tensor)) is not None:
        way_on = "make it dense, or leave it out by `rename`"
        raise ConfigError(f"{name}: {oddity} has no plain dense storage; {way_on}")
    if getattr(tensor, "ds_shape", tensor.shape) != tensor.shape:  # DeepSpeed's, of ZeRO-3
        refuse_part(name, tensor.shape)


def has_storage(tensor: Tensor) -> bool:
    """Whether there is an address, and strides from there on."""
    return _storage_lacking(tensor) is None


def _storage_lacking(tensor: Tensor) -> str | None:
    """What a tensor without an address and strides is."""
    if is_lazy(tensor):
        return "a lazy parameter without data until the first forward pass"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}"
    return None


def _oddity(tensor: Tensor) -> str | None:
    if (kind := _storage_lacking(tensor)) is not None:
        return kind
    if tensor.is_meta:
        return "a tensor on the meta device"
    held = tensor.untyped_storage().nbytes()
    needed = (extent_of(tensor)[1] + 1) * tensor.element_size() if tensor.numel() else 0
    if held < needed:  # it was resized under the tensor, as to offload it
        return f"a tensor whose memory was released ({held} of {needed} bytes)"
    return "a view that is conjugated or negated" if tensor.is_conj() or tensor.is_neg() else None


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """What torch calls `dtype`."""
    return _TORCH[dtype.name]


def integer_dtype(dtype: Dtype) -> torch.dtype:
    """The integer type that carries the bits of `dtype`."""
    return INTEGERS[dtype.item_size]


def as_bits(tensor: Tensor) -> Tensor:
    """`tensor`'s elements as integers of their size, over the same storage."""
    return writable(tensor).view(INTEGERS[tensor.element_size()])


def are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether int[...] bits of one shape, dtype and device are the same."""
    if _is_in_words(left) and _is_in_words(right):  # several at once: torch compares one by one
        left, right = (one.view(-1).view(torch.int64) for one in (left, right))
    return torch.equal(left, right)


def _is_in_words(bits: Tensor) -> bool:
    """Whether they can be seen as int64."""
    count = 8 // bits.element_size()
    places = (bits.numel(), bits.storage_offset(), bits.data_ptr() // bits.element_size())
    fits = all(place % count == 0 for place in places)
    return fits and bits.numel() > 0 and bits.is_contiguous()


@dataclass(frozen=True, slots=True)
class Spread:
    """A box of elements as kernels find them.

    Attributes:
        address: Where they begin. Of codes, where the storage does: a multiple of 4 bytes, as its
            size is.
        source: The elements, by flat position.
        target: Where each is, from there on; in codes, before `apart` is added.
        apart: How far each of its codes is from there, in codes, from the low ones on. All boxes
            of a tensor have codes, or none has.
    """

    address: int
    source: Region
    target: Region
    apart: tuple[int, ...]


class Live:
    """A parameter that is written in place, by flat positions: all of it, or the part held here.

    Runs go position by position, unless a subclass has a shorter way.

    Attributes:
        dtype: Its entry in the closed table.
        line: int[...], on the device where it lives.
        numel: Elements held.
        is_contiguous: Whether all elements lie in one run, `line`.
        in_codes: Whether elements have no address: their 4-bit codes are written one by one.
    """

    __slots__ = ()

    in_codes: ClassVar[bool] = False
    dtype: Dtype
    line: Tensor
    numel: int
    is_contiguous: bool

    def boxes(self) -> list[tuple[Region, Tensor]]:
        """(positions, view): all that is held, in boxes; elements in the order of their positions.

        Empty boxes are left out. Views are not owned. There are none if elements have no address,
        because their bits are in several places.
        """
        return []

    def spread(self) -> list[Spread] | None:
        """Where kernels find all that is held; None if they cannot."""
        return [
            Spread(view.data_ptr(), positions, Region(0, Region.of(view).dims), ())
            for positions, view in self.boxes()
        ]

    def keeps(self, positions: Tensor) -> Tensor | None:
        """bool[n]: which of int64[n] positions are held; None for all."""
        return None

    def gather(self, positions: Tensor) -> Tensor:
        """int[n]: the bits at int64[n] positions that are held."""
        raise NotImplementedError

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        """Overwrite the bits at int64[n] distinct positions that are held with int[n]."""
        raise NotImplementedError

    def held(self, start: int, stop: int) -> Tensor | None:
        """int64[k]: which positions of [start, stop) are held, in order; None for all."""
        found: list[Tensor] = []
        for begin in range(start, max(stop, start + 1), _POSITIONS):
            positions = self._positions(begin, min(begin + _POSITIONS, stop))
            if (kept := self.keeps(positions)) is None:
                return None
            found.append(positions[kept])
        return torch.cat(found)

    def read(self, start: int, stop: int) -> Tensor:
        """int[k]: the bits at those positions of [start, stop) that are held."""
        held = self.held(start, stop)
        return self.gather(self._positions(start, stop) if held is None else held)

    def write(self, start: int, bits: Tensor) -> None:
        """Overwrite what is held of the run that begins at `start` with int[n] bits for all."""
        held = self.held(start, start + len(bits))
        if held is None:
            self.scatter(self._positions(start, start + len(bits)), bits)
        else:
            self.scatter(held, bits[held - start])

    def _positions(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.line.device)


@dataclass(frozen=True, slots=True)
class Flat(Live):
    """Flat row-major access to the bits of a tensor, whatever its strides.

    Attributes:
        tensor: What is read and written, in place. Not owned.
        dtype: Its entry in the closed table.
        line: int[extent], the storage between its first and its last element. For a contiguous
            tensor that is the flattened tensor itself.
        numel: Elements of the tensor.
        is_contiguous: Whether it is.
    """

    tensor: Tensor
    dtype: Dtype
    line: Tensor
    numel: int
    is_contiguous: bool

    @classmethod
    @in_plain_mode
    def of(cls, tensor: Tensor, *, name: str = "tensor") -> Flat:
        """Raises ConfigError for a tensor whose elements have no storage of their own."""
        check_plain(tensor, name)
        dtype, bits, numel = dtype_of(tensor, name=name), as_bits(tensor), tensor.numel()
        if tensor.is_contiguous():
            return cls(tensor, dtype, bits.view(-1), numel, is_contiguous=True)
        region = Region.of(tensor)
        if region.repeats:  # as one does that was expanded
            raise ConfigError(f"{name}: elements share storage; make it contiguous")
        line = bits.as_strided((region.stop - region.start,), (1,))
        return cls(tensor, dtype, line, numel, is_contiguous=False)

    def boxes(self) -> list[tuple[Region, Tensor]]:
        """One, unless there are no elements."""
        return [(Region.run(0, self.numel), self.tensor)] if self.numel else []

    def held(self, start: int, stop: int) -> Tensor | None:
        """None: all of it is held."""
        return None

    def read(self, start: int, stop: int) -> Tensor:
        """int[stop - start]: the bits there; a view where the tensor is contiguous."""
        return self.line[start:stop] if self.is_contiguous else Live.read(self, start, stop)

    def write(self, start: int, bits: Tensor) -> None:
        """Overwrite the run that begins at `start` with int[n] bits."""
        if self.is_contiguous:
            self.line[start : start + len(bits)].copy_(bits)
        else:
            Live.write(self, start, bits)

    def gather(self, positions: Tensor) -> Tensor:
        """int[n]: the bits at int64[n] flat positions."""
        return self.line.index_select(0, self._offsets(positions))

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        """Overwrite the bits at int64[n] distinct flat positions with int[n]."""
        self.line.scatter_(0, self._offsets(positions), bits)

    def _offsets(self, positions: Tensor) -> Tensor:
        """Where the elements at flat `positions` lie in `line`."""
        if self.is_contiguous:
            return positions
        dims = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return Region(0, tuple(dims)).places(positions)


def overlapping(held: Iterable[tuple[str, Live]]) -> tuple[str, str] | None:
    """The names of two that share a byte, or None. A name stands twice if it is one tensor.

    Contiguous tensors cost a place in a sort. Only those are looked at closely whose elements lie
    between those of others.
    """
    boxes = [(name, Region.of_bytes(view)) for name, live in held for _, view in live.boxes()]
    reaching: list[tuple[int, str, Region]] = []
    for name, region in sorted(boxes, key=lambda box: box[1].start):
        reaching = [other for other in reaching if other[0] > region.start]
        for _, other_name, other in reaching:
            if other.meets(region):
                return other_name, name
        reaching.append((region.stop, name, region))
    return None


def storage_of(tensor: Tensor) -> int:
    """What two tensors over the same storage share."""
    return int(tensor.untyped_storage()._cdata)


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Where its first and its last element lie in its storage, in elements."""
    begin, count = int(tensor.storage_offset()), tensor.numel()
    if count and not tensor.is_contiguous():
        count = Region.of(tensor).stop - begin
    return begin, begin + max(0, count - 1)


def identity(tensor: Tensor) -> tuple[object, ...]:
    """What changes when a tensor's storage is moved, replaced or laid out differently."""
    if tensor.is_meta:  # all of these are at the null pointer
        where = storage_of(tensor), int(tensor.storage_offset())
        return (where, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
