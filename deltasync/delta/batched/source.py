"""Where the elements to send are read, as the kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.batched.weights import ALIGNMENT, BatchedWeights, upload
from deltasync.delta.bits import Flat, Reader, copy_read, integer_dtype
from deltasync.delta.digests import Ints, cut
from deltasync.delta.kernels import triton as kernels
from deltasync.dtypes import Dtype

_COPIED = 1 << 24  # elements at once: positions of strided ones take 24 bytes each
_WIDE, _NARROW = dtypes.BY_NAME["float32"], dtypes.BY_NAME["bfloat16"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Chunks that one launch goes over: kernels are compiled for an item size and a conversion.

    Attributes:
        item_size: Bytes of an element on the wire.
        narrow: The source is float32, the wire bfloat16.
        is_aligned: Every chunk begins at a multiple of 16 bytes on both sides.
        chunks: int64[n], which, in order.
        blocks, tiles: int64[n + 1], the first block and tile of each, and the end.
    """

    item_size: int
    narrow: bool
    is_aligned: bool
    chunks: Ints
    blocks: Ints
    tiles: Ints

    @property
    def first_block(self) -> int:
        return int(self.blocks[0])

    @property
    def num_blocks(self) -> int:
        return int(self.blocks[-1] - self.blocks[0])

    def between(self, first: int, stop: int) -> Launch:
        """The chunks from `first` up to `stop` alone."""
        low, high = (int(place) for place in np.searchsorted(self.chunks, (first, stop)))
        ends = slice(low, high + 1)
        return replace(
            self, chunks=self.chunks[low:high], blocks=self.blocks[ends], tiles=self.tiles[ends]
        )


class BatchedSource:
    """Parameters that are sent, chunk by chunk, beside the snapshot that they are compared with.

    Attributes:
        launches: The chunks by how they are read.
        launch_of: int64[chunks], the number of a chunk's launch.
        order: int64[chunks], the chunks in the order of their blocks: launch after launch.
        num_blocks: Blocks of all chunks.
        pointers, narrow: int64[parameters] and bool[parameters]: as given.
        num_tiles: Tiles of all blocks.
        tile_chunk, tile_block: Columns on the device: of each tile its chunk and first block.
        addresses, first_block, shifts, chunk_of: Columns on the device: of each chunk its address,
            its first block, and its beginning relative to its origin; of each block its chunk.
    """

    def __init__(
        self, snapshot: BatchedWeights, pointers: NDArray[np.int64], narrow: NDArray[np.bool_]
    ) -> None:
        """Number the blocks.

        Args:
            snapshot: What the source is compared with.
            pointers: int64[parameters], addresses of the source's parameters.
            narrow: bool[parameters], which of them are float32 and go as bfloat16.
        """
        self.pointers, self.narrow = pointers, narrow
        table, item_sizes = snapshot.table, snapshot.item_sizes
        is_narrow = narrow[table.parameter]
        addresses = snapshot.addresses_of(pointers, np.where(is_narrow, 4, item_sizes))
        # The chunks of a parameter share a launch, so that what is located of it stays together.
        is_apart = ((pointers | snapshot.pointers) % ALIGNMENT != 0)[table.parameter]
        is_apart |= snapshot.ledger.chunk_numel * item_sizes % ALIGNMENT != 0
        shifts = table.start - snapshot.origins
        kinds, self.launch_of = np.unique(
            item_sizes * 4 + is_narrow * 2 + ~is_apart, return_inverse=True
        )
        self.order = order = np.argsort(self.launch_of, kind="stable")
        lengths = -(-table.numel[order] // kernels.BLOCK)
        begins = np.append(0, np.cumsum(lengths))
        tiles = np.append(0, np.cumsum(-(-lengths // kernels.TILE)))
        tile_of, tile_begin = cut(lengths, kernels.TILE)
        cuts = np.searchsorted(self.launch_of[order], np.arange(len(kinds) + 1))
        self.launches = [
            Launch(
                int(kind) // 4,
                bool(kind & 2),
                bool(kind & 1),
                order[low:high],
                begins[low : high + 1],
                tiles[low : high + 1],
            )
            for kind, low, high in zip(kinds, cuts[:-1], cuts[1:], strict=True)
        ]
        self.num_blocks, self.num_tiles = int(begins[-1]), int(tiles[-1])
        first_block = np.empty_like(order)
        first_block[order] = begins[:-1]
        tile_block = np.append(begins[tile_of] + tile_begin, self.num_blocks)
        self.addresses, *columns, chunks, repeats = upload(
            [addresses, first_block, shifts, order[tile_of], tile_block, order, lengths],
            snapshot.device,
        )
        self.first_block, self.shifts, self.tile_chunk, self.tile_block = (
            column.to(torch.int32) for column in columns
        )
        self.chunk_of = torch.repeat_interleave(
            chunks.to(torch.int32), repeats, output_size=self.num_blocks
        )

    def before(self, counts: Ints) -> Ints:
        """int64[chunks]: changes in the blocks before a chunk's, where chunks have `counts`."""
        before = np.empty_like(counts)
        before[self.order] = np.cumsum(counts[self.order]) - counts[self.order]
        return before


class LiveSource:
    """The trainer's parameters: looked up again when they have moved.

    What kernels cannot read in place (strided tensors, rare conversions, other devices) is copied
    at each sync, and the copies are kept until the next.
    """

    def __init__(self, snapshot: BatchedWeights) -> None:
        self._snapshot = snapshot
        self._readers: Sequence[Reader] | None = None
        self._copies: list[Tensor] = []
        self._found: BatchedSource | None = None

    def look_up(self, readers: Sequence[Reader]) -> BatchedSource:
        """Where the parameters are now. The same object as last time if nothing moved."""
        if self._found is not None and readers is self._readers and not self._copies:
            return self._found
        self._copies = []
        narrow = np.zeros(len(readers), np.bool_)
        pointers = np.zeros(len(readers), np.int64)
        for number, reader in enumerate(readers):
            flat = reader.flat
            if flat is not None and self._is_readable(flat, reader.dtype):
                narrow[number] = flat.dtype != reader.dtype
                pointers[number] = flat.line.data_ptr()
            else:
                copy = _copied(reader, self._snapshot.device)
                self._copies.append(copy)
                pointers[number] = copy.data_ptr()
        self._readers = readers
        self._found = BatchedSource(self._snapshot, pointers, narrow)
        return self._found

    def _is_readable(self, flat: Flat, dtype: Dtype) -> bool:
        is_read_as = flat.dtype == dtype or (flat.dtype, dtype) == (_WIDE, _NARROW)
        return is_read_as and flat.is_contiguous and flat.line.device == self._snapshot.device


def _copied(reader: Reader, device: torch.device) -> Tensor:
    """int[numel]: all that it reads."""
    copy = torch.empty(reader.numel, dtype=integer_dtype(reader.dtype), device=device)
    copy_read(reader, Flat.of(copy), step=_COPIED)
    return copy
