"""Where the elements to send are read, as the kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.batched.weights import ALIGNMENT, BatchedWeights, upload
from deltasync.delta.bits import Flat, integer_dtype
from deltasync.delta.digests import Ints, cut
from deltasync.delta.kernels import triton as kernels
from deltasync.delta.kernels.reads import AS_IS, COMPUTED, ROUNDED
from deltasync.delta.readers import Computation, Computed, Reader, copy_read
from deltasync.dtypes import Dtype

_COPIED = 1 << 24  # elements at once: positions of strided ones take 24 bytes each
_WIDE, _NARROW = dtypes.BY_NAME["float32"], dtypes.BY_NAME["bfloat16"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Chunks that one launch goes over: kernels are compiled for an item size and a conversion.

    Attributes:
        item_size: Bytes of an element on the wire.
        read: What kernels do to read the source: see `kernels.read`.
        is_aligned: Every chunk begins at a multiple of 16 bytes on both sides.
        codes_at: What computes the elements, see `Computed`; None if they are read.
        chunks: int64[n], which, in order.
        blocks, tiles: int64[n + 1], the first block and tile of each, and the end.
    """

    item_size: int
    read: int
    is_aligned: bool
    codes_at: Any
    chunks: Ints
    blocks: Ints
    tiles: Ints

    @property
    def is_computed(self) -> bool:
        """Whether its masks come from `BatchedSource.computed`."""
        return self.codes_at is not None

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
        launches: What goes over all chunks.
        launch_of: int64[chunks], the number of a chunk's launch.
        order: int64[chunks], the chunks in the order of their blocks: launch after launch.
        num_blocks: Blocks of all chunks.
        computed: What is computed; what kernels find of it counts as compared.
        tile_chunk, tile_block: Columns on the device: of each tile its chunk and first block.
        addresses, first_block, shifts, chunk_of: Columns on the device: of each chunk its address,
            its first block, and its beginning relative to its origin; of each block its chunk.
        quantized: int64[chunks, 3] on the device: how codes are read, see `Computed.columns`.
    """

    def __init__(
        self,
        snapshot: BatchedWeights,
        pointers: NDArray[np.int64],
        reads: NDArray[np.int64],
        sizes: NDArray[np.int64],
        computed: Computed | None = None,
    ) -> None:
        """Number the blocks.

        Args:
            snapshot: What the source is compared with.
            pointers: int64[parameters], addresses of the source's parameters.
            reads: int64[parameters], what kernels do to read them.
            sizes: int64[parameters], bytes of what is read for one element that is sent.
            computed: What is computed, if something is.
        """
        self.computed = computed
        table = snapshot.table
        read = reads[table.parameter]
        addresses = snapshot.addresses_of(pointers, sizes[table.parameter])
        kinds, self.launch_of = np.unique(_kinds(snapshot, pointers, read), return_inverse=True)
        self.order = order = np.argsort(self.launch_of, kind="stable")
        lengths = -(-table.numel[order] // kernels.BLOCK)
        begins = np.append(0, np.cumsum(lengths))
        tiles = np.append(0, np.cumsum(-(-lengths // kernels.TILE)))
        tile_of, tile_begin = cut(lengths, kernels.TILE)
        cuts = np.searchsorted(self.launch_of[order], np.arange(len(kinds) + 1))
        self.launches = []
        for kind, low, high in zip(kinds.tolist(), cuts[:-1], cuts[1:], strict=True):
            item_size, how, is_aligned = kind % 32 // 2, kind // 32, bool(kind & 1)
            codes_at = computed.codes_at if computed is not None and how >= COMPUTED else None
            here, ends = order[low:high], slice(low, high + 1)
            self.launches.append(
                Launch(item_size, how, is_aligned, codes_at, here, begins[ends], tiles[ends])
            )
        self.num_blocks = int(begins[-1])
        first_block = np.empty_like(order)
        first_block[order] = begins[:-1]
        tile_block = np.append(begins[tile_of] + tile_begin, self.num_blocks)
        none = np.zeros((len(pointers), 3), np.int64)
        quantized = (none if computed is None else computed.columns(len(pointers)))[table.parameter]
        of_chunks = addresses, quantized, first_block, table.start - snapshot.origins
        self.addresses, self.quantized, *columns, chunks, repeats = upload(
            [*of_chunks, order[tile_of], tile_block, order, lengths], snapshot.device
        )
        self.first_block, self.shifts, self.tile_chunk, self.tile_block = (
            column.to(torch.int32) for column in columns
        )
        if computed is not None:
            computed.place(reads, snapshot, first_block)
        self.chunk_of = torch.repeat_interleave(
            chunks.to(torch.int32), repeats, output_size=self.num_blocks
        )

    def before(self, counts: Ints) -> Ints:
        """int64[chunks]: changes in the blocks before a chunk's, where chunks have `counts`."""
        if len(self.launches) == 1:
            return np.cumsum(counts) - counts
        ordered, before = counts[self.order], np.empty_like(counts)
        before[self.order] = np.cumsum(ordered) - ordered
        return before


def _kinds(snapshot: BatchedWeights, pointers: Ints, read: Ints) -> Ints:
    """int64[chunks]: numbers that tell apart what one launch cannot go over.

    The chunks of a parameter share a launch, so that what is located of it stays together.
    """
    item_sizes = snapshot.item_sizes
    is_apart = ((pointers | snapshot.pointers) % ALIGNMENT != 0)[snapshot.table.parameter]
    is_apart |= snapshot.ledger.chunk_numel * item_sizes % ALIGNMENT != 0
    kinds: Ints = read * 32 + item_sizes * 2 + ~is_apart
    return kinds


class LiveSource:
    """The trainer's parameters: looked up again when they have moved.

    What kernels cannot read in place (strided tensors, rare conversions, other devices) is copied
    at each sync, and the copies are kept until the next.
    """

    def __init__(self, snapshot: BatchedWeights) -> None:
        self._snapshot = snapshot
        self._readers: Sequence[Reader] | None = None
        self._copies: list[tuple[Reader, Tensor]] = []
        self._found: BatchedSource | None = None

    def look_up(self, readers: Sequence[Reader]) -> BatchedSource:
        """Where the parameters are now. The same object as last time if nothing moved."""
        if self._found is not None and readers is self._readers:
            for reader, copy in self._copies:
                copy_read(reader, Flat.of(copy), step=_COPIED)
            return self._found
        self._copies = []
        pointers, reads, sizes = np.zeros((3, len(readers)), np.int64)
        computations = [reader.computation for reader in readers]
        codes = {
            number: one
            for number, one in enumerate(computations)
            if one is not None and self._is_computable(one)
        }
        computed = None
        if codes:
            computed = next(iter(codes.values())).together(codes, self._snapshot.device)
        for number, (reader, one) in enumerate(zip(readers, computations, strict=True)):
            flat, sizes[number] = reader.flat, reader.dtype.item_size
            if number in codes:
                code = codes[number]
                pointers[number], reads[number] = code.address, code.read
                sizes[number] = code.source_bytes
            elif (
                computed is not None
                and one is not None
                and (found := computed.source_of(one)) is not None
            ):
                pointers[number], is_wide = found
                reads[number] = ROUNDED if is_wide and reader.dtype == _NARROW else AS_IS
            elif flat is not None and self._is_readable(flat, reader.dtype):
                reads[number] = AS_IS if flat.dtype == reader.dtype else ROUNDED
                pointers[number] = flat.line.data_ptr()
            else:
                copy = _copied(reader, self._snapshot.device)
                self._copies.append((reader, copy))
                pointers[number] = copy.data_ptr()
        sizes[reads == ROUNDED] = _WIDE.item_size
        self._readers = readers
        self._found = BatchedSource(self._snapshot, pointers, reads, sizes, computed)
        return self._found

    def _is_computable(self, computation: Computation) -> bool:
        return (
            computation.kept_dtype is None
            and self._snapshot.ledger.chunk_numel % kernels.BLOCK == 0
            and computation.has_kernels(self._snapshot.device)
        )

    def _is_readable(self, flat: Flat, dtype: Dtype) -> bool:
        is_read_as = flat.dtype == dtype or (flat.dtype, dtype) == (_WIDE, _NARROW)
        return is_read_as and flat.is_contiguous and flat.line.device == self._snapshot.device


def _copied(reader: Reader, device: torch.device) -> Tensor:
    """int[numel]: all that it reads."""
    copy = torch.empty(reader.numel, dtype=integer_dtype(reader.dtype), device=device)
    copy_read(reader, Flat.of(copy), step=_COPIED)
    return copy
