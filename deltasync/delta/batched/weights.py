"""Where weights lie, as the kernels read it, and their digests from scratch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate, chain
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.packing import origins_of, scattered
from deltasync.delta.bits import Live
from deltasync.delta.codes import Codes, Spread
from deltasync.delta.digests import DigestLedger, Ints, cut
from deltasync.delta.kernels import triton_live as kernels
from deltasync.delta.kernels.triton_base import SEGMENT, SPAN, TYPES
from deltasync.delta.region import Pairs, Region, paired

ALIGNMENT = 16
"""Bytes that kernels read at once, and elements; every array of an upload begins at a multiple."""


FLAG_AT = 2 * 2 * kernels.ACCUMULATORS
CHANGES_AT = FLAG_AT + 2
"""Where the numbers of a sync have a flag and changes of digests. What comes first is sums."""

_MOST_CODES = 16
"""Of 4 bits, in an element of 8 bytes."""


class Boxes:
    """Where parameters lie, if one of them does not lie in one run: see `Live.boxes`.

    Attributes:
        count, first: int64[parameters]: how many boxes each has, and which is its first.
        address: int64[boxes].
        is_spread: bool[parameters]: whether its elements are codes of 4 bits, each at its own
            place. Its boxes are `Spread`.
        dims: Of every box: the most that one needs. 0 without boxes.
        table: int64[2 + 3 * dims + 16, boxes] on the device, and how many: as kernels take them.
    """

    def __init__(
        self, flats: Mapping[int, Live], num_parameters: int, device: torch.device
    ) -> None:
        boxes: list[tuple[int, int, Pairs, tuple[int, ...]]] = []
        self.count = np.zeros(num_parameters, np.int64)
        self.is_spread = np.zeros(num_parameters, np.bool_)
        if not all(flat.is_contiguous for flat in flats.values()):
            for parameter, flat in flats.items():
                found = _spread(flat)
                self.count[parameter] = len(found)
                self.is_spread[parameter] = isinstance(flat, Codes)
                boxes += [
                    (one.address, one.source.start, paired(one.source, one.target), one.apart)
                    for one in found
                ]
        self.first = np.cumsum(self.count) - self.count
        self.dims = max((max(1, len(dims)) for _, _, dims, _ in boxes), default=0)
        rows = [
            [address, start, *self._padded(dims), *apart, *[0] * (_MOST_CODES - len(apart))]
            for address, start, dims, apart in boxes
        ]
        columns = np.array(rows, np.int64).reshape(len(boxes), 2 + 3 * self.dims + _MOST_CODES).T
        self.address: NDArray[np.int64] = columns[0]
        (there,) = upload([columns], device)
        self.table = there, len(boxes)

    @property
    def has_codes(self) -> bool:
        """Whether elements are codes of 4 bits, each at its own place."""
        return bool(self.is_spread.any())

    def _padded(self, dims: Pairs) -> Iterator[int]:
        """The numbers of so many dimensions, the first of them of one element each."""
        return chain.from_iterable([(1, 1 << 62, 0)] * (self.dims - len(dims)) + dims)

    def of(self, parameter: Ints) -> tuple[Ints, Ints]:
        """(which, box): all boxes of each of these parameters."""
        which, nth = cut(self.count[parameter], 1)
        return which, self.first[parameter[which]] + nth


class BatchedWeights:
    """Weights by chunk.

    Attributes:
        device: Where kernels run.
        side: A stream for what need not keep the current one; None on the CPU.
        ledger: What says which chunks there are; its sums are not looked at.
        table: The chunks.
        pointers: int64[parameters], addresses of contiguous ones; 0 for others.
        boxes: Where all lie, as far as they are held, if there are others.
        item_sizes: int64[chunks], bytes of an element.
        origins: int64[chunks], what indices of a chunk are relative to.
        is_scattered: bool[chunks], which are no run in their parameter.
        has_gaps: Whether any region has gaps between its rows.
        addresses: int64[chunks], of each chunk's first element.
        addresses_there, starts, numels, keys, cols, gaps: The columns of the chunks on the device.
    """

    def __init__(
        self, flats: Mapping[int, Live], ledger: DigestLedger, device: torch.device
    ) -> None:
        """Look up where the weights are.

        Args:
            flats: The weights by parameter; on `device` or in pinned host memory. Not owned: they
                must outlive this object.
            ledger: Whose chunks are meant.
            device: Where kernels run.
        """
        self.device, self.ledger = device, ledger
        self.side = None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._flats = flats
        table = self.table = ledger.table
        self.item_sizes = ledger.item_sizes[table.parameter]
        self.origins, self.is_scattered = origins_of(table), scattered(ledger)
        self.has_gaps = bool(ledger.gaps.any())
        self.pointers = np.zeros(len(ledger.specs), np.int64)
        for parameter, flat in flats.items():
            if flat.is_contiguous:
                self.pointers[parameter] = flat.line.data_ptr()
        self.boxes = Boxes(flats, len(ledger.specs), device)
        self.addresses = self.addresses_of(self.pointers, self.item_sizes)
        columns = ledger.keys.view(np.int64), ledger.cols, ledger.gaps
        self.addresses_there, self.starts, self.numels, self.keys, self.cols, self.gaps = upload(
            [self.addresses, table.start, table.numel, *(c[table.parameter] for c in columns)],
            device,
        )

    @cached_property
    def facts(self) -> Ints:
        """int64[3, parameters]: address as in `pointers`, digest key, and first chunk."""
        ledger = self.ledger
        return np.array([self.pointers, ledger.keys.view(np.int64), ledger.first[:-1]])

    @cached_property
    def dtype_codes(self) -> Ints:
        """int64[parameters]: the wire codes of their dtypes."""
        return np.array([spec.dtype.code for spec in self.ledger.specs], np.int64)

    @cached_property
    def ways(self) -> Ints:
        """int64[2 * parameters]: how kernels find the sparse, and the dense, rows of each.

        That is 8 times the bytes of an element, and 4 if it is spread, 2 if it is looked for in
        boxes, 1 if the row is dense.
        """
        is_dense = np.array([0, 1])
        # Sparse rows all go by boxes, if any does: that is one launch, and one for spread codes.
        in_run = (self.pointers != 0)[:, None] & (is_dense == 1)
        in_boxes = (self.boxes.count > 0)[:, None] & ~in_run
        each = 8 * self.ledger.item_sizes + 4 * self.boxes.is_spread
        found: Ints = each[:, None] + 2 * in_boxes + is_dense
        return found.reshape(-1)

    @cached_property
    def blank(self) -> Tensor:
        """int64[n] on the device: what `BatchedStaging` begins a sync with."""
        numbers = np.zeros(CHANGES_AT + len(self.ledger.sums), np.int64)
        numbers[FLAG_AT] = kernels.CLEAR
        return upload([numbers], self.device)[0]

    def join_side(self) -> None:
        """Let what the current stream is given from now on come after the side stream's work."""
        if self.side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    def synchronize(self) -> None:
        """Wait on the host until the side stream's work is done."""
        if self.side is not None:
            self.side.synchronize()

    def addresses_of(
        self, pointers: NDArray[np.int64], item_sizes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """int64[chunks]: addresses of the chunks of parameters that begin at `pointers`."""
        addresses: NDArray[np.int64] = (
            pointers[self.table.parameter] + self.table.start * item_sizes
        )
        return addresses

    def digests(self, chunks: NDArray[np.int64] | None = None) -> NDArray[np.uint64]:
        """uint64[n]: the digests of these chunks, or of all, read from memory. Waits for them."""
        if chunks is None:
            chunks = np.arange(len(self.addresses))
        parameter = self.table.parameter[chunks]
        in_runs, (which, box) = np.flatnonzero(self.pointers[parameter]), self.boxes.of(parameter)
        others = self.pointers[parameter[which]] == 0
        which, box = which[others], box[others]
        is_spread = self.boxes.is_spread[parameter[which]]
        found = np.zeros(len(chunks), np.uint64)
        with device_of(self.device):
            for item_size in np.unique(self.item_sizes[chunks]).tolist():
                here = self.item_sizes[chunks] == item_size
                these = in_runs[here[in_runs]]
                found[these] = self._digests(chunks[these], item_size)
                for codes in (0, 2 * item_size):
                    these = np.flatnonzero(here[which] & (is_spread == bool(codes)))
                    in_boxes = self._digests(chunks[which[these]], item_size, box[these], codes)
                    np.add.at(found, which[these], in_boxes)
        return found

    def _digests(
        self, chunks: Ints, item_size: int, box: Ints | None = None, codes: int = 0
    ) -> NDArray[np.uint64]:
        """uint64[n]: digests of chunks that are contiguous, or of what of each is in a box.

        With `codes` an element has so many of 4 bits, spread as the box says.
        """
        if not len(chunks):
            return np.zeros(0, np.uint64)
        there, box_of = upload([chunks, chunks if box is None else box], self.device)
        sums = torch.zeros(len(chunks), dtype=torch.int64, device=self.device)
        each = blocks_in(self.table.numel[chunks])
        kernels.digest[(len(chunks) * each,)](
            self.addresses_there,
            self.starts,
            self.numels,
            self.keys,
            self.cols,
            self.gaps,
            there,
            box_of,
            *self.boxes.table,
            sums,
            each,
            TYPE=TYPES[item_size],
            DIMS=0 if box is None else self.boxes.dims,
            CODES=codes,
            GAPS=self.has_gaps,
            ALIGNED=box is None and self._is_aligned(chunks),
            BLOCK=SPAN,
            num_warps=4,
        )
        return sums.cpu().numpy().view(np.uint64)

    def _is_aligned(self, chunks: Ints) -> bool:
        return not ((self.addresses | self.table.numel)[chunks] % ALIGNMENT).any()


def _spread(flat: Live) -> list[Spread]:
    """The boxes of a parameter, of codes or not."""
    if isinstance(flat, Codes):
        found = flat.spread()
        assert found is not None, "the host works on such weights"
        return found
    return [
        Spread(view.data_ptr(), positions, Region(0, Region.of(view).dims), ())
        for positions, view in flat.boxes()
    ]


def blocks_in(numels: NDArray[np.int64]) -> int:
    """The most programs of a dense kernel that one of these runs of elements takes."""
    return -(-int(numels.max()) // SPAN)


def segments_in(counts: Ints) -> tuple[Ints, Ints]:
    """(first, number): of the segments that rows of so many elements are cut into."""
    number = -(-counts // SEGMENT)
    return np.cumsum(number) - number, number


def segment_rows(number: Ints, there: Tensor) -> Tensor:
    """int64[segments] on the device: which row each is of. `there`: their number, on the device."""
    return torch.repeat_interleave(there, output_size=int(number.sum()))


def device_of(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Upload:
    """Arrays of int64 on their way to a device, in one copy that the host does not wait for.

    Args:
        shapes: Of each array.
        device: Where they go.

    Attributes:
        arrays: To be filled, before `send`.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        sizes = [prod(shape) for shape in shapes]
        # Kernels are compiled for addresses that are multiples of ALIGNMENT.
        begins = accumulate((size + size % 2 for size in sizes), initial=0)
        self._places = [
            slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)
        ]
        last = self._places[-1].stop
        pinned = device.type == "cuda"
        self._host = torch.empty(last, dtype=torch.int64, device="cpu", pin_memory=pinned)
        view = self._host.numpy()
        self.arrays: list[NDArray[np.int64]] = [
            view[place].reshape(shape) for place, shape in zip(self._places, shapes, strict=True)
        ]

    def send(self) -> list[Tensor]:
        """The arrays on the device."""
        there = self._host.to(self._device, non_blocking=True)
        return [
            there[place].view(shape)
            for place, shape in zip(self._places, self._shapes, strict=True)
        ]


def upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """The arrays on the device: see `Upload`."""
    there = Upload([array.shape for array in arrays], device)
    for place, array in zip(there.arrays, arrays, strict=True):
        place[...] = array
    return there.send()


class Numbers:
    """A tensor's values on their way to the host, as they are on the current stream now."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.clone()

    def read(self) -> NDArray[Any]:
        """Wait until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
