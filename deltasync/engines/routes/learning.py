"""Where a function puts the elements of tensors, learnt from tensors whose bytes count.

Engines transpose, pad, shuffle and merge quantized weights after loading. What such code does to a
tensor is found without reading it: it runs on tensors of which every byte carries a digit, in base
256, of its own number, once for each digit. It runs again on the complements of all digits. A byte
that comes back with the same number both times was moved; one that is always alike is padding;
anything else was computed. Numbers are few of the values that occur, and they rise. So code that
sorts, clamps, or looks for special values may treat them as if it moved them. What seems to be
moved must therefore be moved with `probes` as well: with ones, and with values of all sizes.

Kernels of 4 bits move half bytes. What they do is learnt in the same way, from tensors of which
every half byte carries a digit in base 16.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from deltasync.delta.bits import as_bits, extent_of
from deltasync.engines.routes.codes import CODE_BITS
from deltasync.engines.routes.regions import unpaired
from deltasync.engines.routes.route import Piece, joined
from deltasync.engines.running import raise_lack_of_memory

PADDING, COMPUTED = -1, -2
_CPU = torch.device("cpu")
_ALIGNED = 32  # bytes or half bytes; at least the largest element
_BYTE = 8
_GENTLE = 6  # bits
_BLOCK = 1 << 24  # fields that are looked at together
_MOST_PIECES = 1024  # of one tensor: beyond, writes would be slow

# What code raises at values that it does not take.
_REFUSALS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)

Tensors = Mapping[str, Tensor]
Process = Callable[[Tensors], Tensors]
"""Takes tensors of the wanted shapes and dtypes; returns what it makes of them."""


class _NotStill(Exception):
    """A result that was thought to be an input as it is, is not."""


class Moves:
    """Where a function puts the bytes of its inputs.

    Args:
        process: The function. It is called several times, with other bits, and must not keep what
            it is given, nor write to it.
        inputs: What it takes; shapes and dtypes alone are read.
        bits: 8, or 4 for codes of 4 bits. These are then the elements below. They count from the
            low bits of an element, and of each byte. Floats are no codes; they are all 1 then.
        is_gentle: Whether digits are of 6 bits, so that floats are neither NaN nor negative, for
            code that raises at such.
        device: Where what it is given is made, and looked at. It takes some 28 bytes for each byte
            of the inputs, but for those that stay.
        still: Results that may be the inputs of the same names, as they are: where that is so at
            every call, nothing is kept of their bytes.

    Attributes:
        still: Those of them that are.

    Raises what `process` raises.
    """

    def __init__(
        self,
        process: Process,
        inputs: Tensors,
        bits: int = _BYTE,
        *,
        is_gentle: bool = False,
        device: torch.device = _CPU,
        still: Collection[str] = (),
    ) -> None:
        self._inputs, self._bits, self._device = dict(inputs), bits, device
        self._process, self.still = process, set(still)
        self._starts: dict[str, int] = {}
        total = 0
        for name, tensor in inputs.items():
            self._starts[name] = total
            total = _rounded_up(total + self._count(tensor), _ALIGNED)
        self._learn(total, min(bits, _GENTLE if is_gentle else _BYTE))
        self._numbered = list(self._inputs)
        self._from = {name: self._sources(found) for name, found in self._made.items()}

    def _learn(self, total: int, width: int) -> None:
        is_done = False
        while not is_done:  # anew whenever something that was thought to stay does not
            with suppress(_NotStill):
                self._made = self._numbers(total, width)
                for probe in range(PROBES):
                    self._look(probe, total)
                is_done = True

    def _fields_made(self, given: Tensors) -> dict[str, Tensor]:
        """uint8[fields] of what the function makes, by result, but of what stays."""
        fields = {name: self._fields(one) for name, one in self._process(given).items()}
        other = {
            name
            for name in self.still
            if name not in fields or not torch.equal(fields[name], self._fields(given[name]))
        }
        if other:
            self.still -= other
            raise _NotStill
        return {name: one for name, one in fields.items() if name not in self.still}

    def _numbers(self, total: int, width: int) -> dict[str, Tensor]:
        """By result, int[fields]: the number of the input's field there, PADDING or COMPUTED.

        A field is so many bits, and a digit is `width` bits of it. There is a digit beyond the
        numbers' own, which is 0 in all fields, so that code which turns bits does not look as if it
        moved any.
        """
        dtype, largest = torch.int32 if total < 1 << 31 else torch.int64, (1 << width) - 1
        digits = max(1, -(-total.bit_length() // width))
        first: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        is_padding: dict[str, Tensor] = {}
        is_moved: dict[str, Tensor] = {}
        for digit in range(digits + 1):
            straight, mirrored = (
                self._fields_made(self._counting((width * digit, largest, mask)))
                for mask in (0, largest)
            )
            for name in straight.keys() & mirrored.keys():
                one, other = straight[name], mirrored[name]
                if digit == 0:
                    first[name], found[name] = one, torch.zeros_like(one, dtype=dtype)
                    is_padding[name] = is_moved[name] = torch.ones_like(one, dtype=torch.bool)
                if name not in found or len(one) != len(found[name]) or len(one) != len(other):
                    found.pop(name, None)  # its shape depends on values
                    continue
                if digit < digits:
                    found[name] += one.to(dtype) << width * digit
                else:
                    is_moved[name] = is_moved[name] & (one == 0)
                is_padding[name] = is_padding[name] & (one == other) & (one == first[name])
                is_moved[name] = is_moved[name] & (one == largest - other)
        for name, numbers in found.items():
            numbers[~is_moved[name] | (numbers < 0) | (numbers >= total)] = COMPUTED
            numbers[is_padding[name]] = PADDING
        return found

    def _counting(self, digit: tuple[int, int, int]) -> dict[str, Tensor]:
        """The inputs with a digit of their numbers, which is given as in the function below."""
        return {
            name: _counting(one, self._starts[name], digit, self._bits, self._device)
            for name, one in self._inputs.items()
        }

    def _look(self, probe: int, total: int) -> None:
        """Take for computed what does not move with these values, if the function takes them."""
        given = {name: probed(one, probe, self._device) for name, one in self._inputs.items()}
        line = torch.zeros(total, dtype=torch.uint8, device=self._device)
        for name, tensor in given.items():
            start = self._starts[name]
            line[start : start + self._count(tensor)] = self._fields(tensor)
        try:
            fields = self._fields_made(given)
        except _REFUSALS as error:  # a cold start on such values raises, too
            raise_lack_of_memory(error)
            return
        # Whether the others are there, and how large they are, depends on values.
        self._made = {
            name: numbers
            for name, numbers in self._made.items()
            if name in fields and len(fields[name]) == len(numbers)
        }
        for name, numbers in self._made.items():
            for some, here in zip(
                torch.split(numbers, _BLOCK), torch.split(fields[name], _BLOCK), strict=True
            ):
                some[(some >= 0) & (line[some.clamp(min=0)] != here)] = COMPUTED

    def places(self, name: str, live: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Where the elements of an input are.

        Args:
            name: The input.
            live: Results that are laid out as wanted, by name. Results that are not named here
                are left out.

        Returns:
            By result: int[n] elements of the input, row-major, and int64[n] places of them in the
            live tensor's storage, in elements of the input's size. An element of which the bytes
            do not lie together is in none.
        """
        found = {}
        for result, tensor in live.items():
            if name in self._from.get(result, ()):
                elements, places = self._places(name, result, tensor)
                if len(elements):
                    found[result] = elements, places
        return found

    def _places(self, name: str, result: str, live: Tensor) -> tuple[Tensor, Tensor]:
        start, count = self._starts[name], self._count(self._inputs[name])
        size = self._inputs[name].element_size() if self._bits == _BYTE else 1
        own = live.element_size() * _BYTE // self._bits
        line, begin = _laid_out(self._made[result], live, own, size)
        rows = line.view(-1, size)
        first = rows[:, 0]
        following = torch.arange(size, dtype=first.dtype, device=first.device)
        whole = (rows == first[:, None] + following).all(1)
        whole &= (first >= start) & (first < start + count)
        whole &= (first - start) % size == 0
        return (first[whole] - start) // size, whole.nonzero().view(-1) + begin

    def _sources(self, numbers: Tensor) -> set[str]:
        """Names of the inputs of which a result has bytes."""
        starts = torch.tensor(
            list(self._starts.values()), dtype=numbers.dtype, device=numbers.device
        )
        found: set[int] = set()
        for block in torch.split(numbers, _BLOCK):
            which = torch.bucketize(block[block >= 0], starts, right=True) - 1
            found.update(torch.bincount(which).nonzero().view(-1).tolist())
        return {self._numbered[number] for number in found}

    def _fields(self, tensor: Tensor) -> Tensor:
        return _fields(tensor, self._bits, self._device)

    def _count(self, tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size() * _BYTE // self._bits


def pieces_of(live: str, source: Tensor, target: Tensor) -> tuple[Piece, ...] | None:
    """Pieces of a route from elements and places; None if too many are needed.

    Args:
        live: The live tensor's name.
        source: int64[n] elements of a checkpoint tensor, rising.
        target: int64[n] places of the same elements in the live tensor's storage.
    """
    both = torch.stack((source, target))
    dims: list[tuple[int, int, int]] = []
    while (count := both.shape[1]) > 1:
        steps = both.diff(dim=1)
        step = steps[:, :1]
        other = (steps != step).any(0)
        run = int(other.int().argmax()) + 1 if bool(other.any()) else count
        rows = both.view(2, -1, run) if count % run == 0 else None
        inside = both[:, :run] - both[:, :1]
        if rows is None or bool((step <= 0).any()) or not _is_like(rows, inside):
            return _runs(live, both, dims)
        dims.insert(0, (run, int(step[0]), int(step[1])))
        both = both[:, ::run]
    return (_piece(live, both[:, 0].tolist(), dims),) if both.shape[1] else ()


def _is_like(rows: Tensor, inside: Tensor) -> bool:
    return bool((rows - rows[:, :, :1] == inside[:, None]).all())


def _runs(
    live: str, both: Tensor, dims: Sequence[tuple[int, int, int]]
) -> tuple[Piece, ...] | None:
    """Pieces of boxes that are not all at equal distances: one for each run of them that are."""
    steps = both.diff(dim=1)
    turns = (steps[:, 1:] != steps[:, :-1]).any(0).nonzero().view(-1).tolist()
    if max(len(turns), int((steps <= 0).any(0).count_nonzero())) > 2 * _MOST_PIECES:
        return None
    pieces, begin, last = [], 0, both.shape[1] - 1
    while begin <= last:
        step = steps[:, begin].tolist() if begin < last else [0, 0]
        after = bisect_left(turns, begin)
        end = (turns[after] + 1 if after < len(turns) else last) if min(step) > 0 else begin
        run = (end - begin + 1, step[0], step[1])
        pieces.append(_piece(live, both[:, begin].tolist(), [run, *dims]))
        begin = end + 1
    found = joined(pieces)
    return found if len(found) <= _MOST_PIECES else None


def _piece(live: str, starts: Sequence[int], dims: Sequence[tuple[int, int, int]]) -> Piece:
    return Piece.of(live, *unpaired(starts[0], starts[1], dims))


PROBES = 5


def probed(like: Tensor, number: int, device: torch.device = _CPU) -> Tensor:
    """Values that numbers are not, to try functions on; the same in each process.

    Floats are finite: of all sizes, with a sign on every other one; among the smallest; among the
    largest; ones; or from 1.5 down to 0.5. Integers are of random bits.

    Args:
        like: The wanted shape and dtype.
        number: Which of `PROBES`.
        device: Where to make them.
    """
    generator = torch.Generator(device).manual_seed(number)
    count, size = like.numel(), like.element_size()
    if not like.is_floating_point():
        line = torch.empty(count * size, dtype=torch.uint8, device=device)
        return line.random_(generator=generator).view(like.dtype).view(like.shape)
    if number >= 3:
        end = 1.0 if number == 3 else 0.5
        values = torch.linspace(2.0 - end, end, count, dtype=torch.float32, device=device)
        return values.to(like.dtype).view(like.shape)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64, device=device)
    largest = as_bits(torch.tensor(torch.finfo(like.dtype).max, device="cpu").to(like.dtype))
    most = int(largest) % (1 << _BYTE * size)
    bits = ((most if number == 0 else 8) * drawn).long()
    if number == 2:
        bits = most - bits
    if number == 0 and like.dtype != torch.float8_e8m0fnu:  # which has no sign
        bits[::2] -= 1 << _BYTE * size - 1
    return bits.to(largest.dtype).view(like.dtype).view(like.shape)


def _counting(
    like: Tensor, start: int, digit: tuple[int, int, int], bits: int, device: torch.device
) -> Tensor:
    """A tensor whose fields have a digit of their numbers, which begin at `start`.

    The digit is given as (shift, mask, what is exchanged in it).
    """
    if bits == CODE_BITS and like.is_floating_point():
        return torch.ones(like.shape, device=device).to(like.dtype)
    shift, mask, exchanged = digit
    count = like.numel() * like.element_size() * _BYTE // bits
    digits = torch.empty(count, dtype=torch.uint8, device=device)
    for begin in range(0, count, _BLOCK):
        some = digits[begin : begin + _BLOCK]
        numbers = torch.arange(start + begin, start + begin + len(some), device=device)
        some.copy_((numbers >> shift) & mask ^ exchanged)
    if bits == CODE_BITS:
        digits = digits[::2] | digits[1::2] << CODE_BITS
    return digits.view(like.dtype).view(like.shape)


def _fields(tensor: Tensor, bits: int, device: torch.device) -> Tensor:
    """uint8[fields] of the elements, row-major."""
    found = as_bits(tensor.detach()).to(device).contiguous().view(-1).view(torch.uint8)
    if bits == CODE_BITS:
        found = torch.stack((found & 15, found >> CODE_BITS), 1).view(-1)
    return found


def _laid_out(numbers: Tensor, live: Tensor, own: int, size: int) -> tuple[Tensor, int]:
    """The numbers of fields as they lie in a live tensor's storage, and where they begin.

    Args:
        numbers: int[fields], row-major.
        live: The tensor.
        own: Fields of each of its elements.
        size: Fields; the result begins and ends at multiples of it, and counts in it.
    """
    begin, last = extent_of(live)
    ahead = begin * own % size
    stop = _rounded_up(ahead + (last + 1 - begin) * own, size)
    line = numbers.new_full((stop,), PADDING)
    strides = [stride * own for stride in live.stride()]
    line.as_strided((*live.shape, own), (*strides, 1), ahead).copy_(numbers.view(*live.shape, own))
    return line, (begin * own - ahead) // size


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
