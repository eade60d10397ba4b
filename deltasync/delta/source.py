"""Where kernels read what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, integer_dtype
from deltasync.delta.kernels.reads import AS_IS, COMPUTED, ROUNDED
from deltasync.delta.launches import Tiles, aligned_by_size, there
from deltasync.delta.readers import Masks, Reader, copy_read
from deltasync.delta.tiles import Ints, Section
from deltasync.dtypes import Dtype
from deltasync.wire.changes import ALIGNMENT, TILE

COPIED = 1 << 24  # elements at once: positions of strided ones take 24 bytes each
WORDS = TILE // 32
"""Of the mask of a tile, see `kernels.tiles.compare`."""

_WIDE, _NARROW = dtypes.BY_NAME["float32"], dtypes.BY_NAME["bfloat16"]


@dataclass(frozen=True, slots=True)
class Kind:
    """Tiles of a section that one launch compares.

    Attributes:
        read: How kernels read the source, see `kernels.reads`.
        is_aligned: Whether both sides begin at multiples of 16 bytes.
        num: How many tiles.
        these: int32[num], counted from the first of the section; None for all.
    """

    read: int
    is_aligned: bool
    num: int
    these: Tensor | None


class Source:
    """Where kernels read what is sent.

    What they cannot read in place (strided tensors, rare conversions, other devices) is copied
    before each comparison.

    Args:
        tiles: What it is compared with.
        at: int64[shares]: addresses of that.
        readers: Of all shares, in the order of the space.

    Attributes:
        new_at: int64[tiles]: addresses.
        reads_of: int32[tiles]: how each is read.
        computed: int64[tiles, 4], see `kernels.collect`; `masks` computes what they say.
        kinds: By item size.
    """

    def __init__(self, tiles: Tiles, at: Ints, readers: Sequence[Reader]) -> None:
        self._space, self._device = tiles.space, tiles.device
        self._copies: list[tuple[Reader, Tensor]] = []
        pointers, reads, sizes = np.zeros((3, len(readers)), np.int64)
        codes = {
            share: one
            for share, reader in enumerate(readers)
            if (one := reader.computation) is not None
            and one.is_codes
            and one.has_kernels(self._device)
        }
        self.masks: Masks | None = None
        if codes:
            self.masks = next(iter(codes.values())).together(codes, self._device)
        for share, reader in enumerate(readers):
            if (code := codes.get(share)) is not None:
                row = code.address, code.read, code.source_bytes
            else:
                row = self._place(reader)
            pointers[share], reads[share], sizes[share] = row
        space = self._space
        address = pointers[space.share] + space.start * sizes[space.share]
        self.new_at = there(address, self._device)
        self.reads_of = there(reads[space.share].astype(np.int32), self._device)
        self.computed = self.new_at
        if self.masks is not None:
            columns = self.masks.columns(len(readers))[space.share]
            own = np.concatenate((columns, space.start[:, None]), axis=1)
            self.computed = there(own, self._device)
            self.masks.place(reads, at, space.first[:-1] * WORDS)
        is_aligned = (pointers | at) % ALIGNMENT == 0
        self.kinds = {
            one.item_size: list(self._kinds(one, reads, is_aligned)) for one in space.sections
        }
        fits = aligned_by_size(space, address)
        self.suits_wide_loads = {size: fits[size] and tiles.aligned[size] for size in fits}

    def copy(self) -> None:
        """Copy what is not read in place once more."""
        for reader, copy in self._copies:
            copy_read(reader, Flat.of(copy), step=COPIED)

    def reads(self, item_size: int) -> list[int]:
        """The ways in which tiles are read."""
        return sorted({kind.read for kind in self.kinds[item_size]})

    def codes_at(self, read: int) -> Any:
        """What computes codes that are read in this way."""
        return None if self.masks is None or read < COMPUTED else self.masks.codes_at

    def _kinds(
        self, section: Section, reads: Ints, is_aligned: NDArray[np.bool_]
    ) -> Sequence[Kind]:
        share = self._space.share[section.first : section.stop]
        kinds = (2 * reads + is_aligned)[share]
        found = []
        for kind in np.unique(kinds).tolist():
            tiles = np.flatnonzero(kinds == kind)
            these = None
            if len(tiles) < len(kinds):
                these = there(tiles.astype(np.int32), self._device)
            found.append(Kind(kind // 2, bool(kind % 2), len(tiles), these))
        return found

    def _place(self, reader: Reader) -> tuple[int, int, int]:
        """(address, read, bytes of an element) of what is not computed as codes are."""
        flat, one, size = reader.flat, reader.computation, reader.dtype.item_size
        scales = None if self.masks is None or one is None else self.masks.source_of(one)
        if scales is not None:
            address, is_wide = scales
            is_rounded = is_wide and reader.dtype == _NARROW
        elif flat is not None and self._is_readable(flat, reader.dtype):
            address, is_rounded = flat.line.data_ptr(), flat.dtype != reader.dtype
        else:
            dtype = integer_dtype(reader.dtype)
            copy = torch.empty(reader.numel, dtype=dtype, device=self._device)
            self._copies.append((reader, copy))
            return copy.data_ptr(), AS_IS, size
        return (address, ROUNDED, _WIDE.item_size) if is_rounded else (address, AS_IS, size)

    def _is_readable(self, flat: Flat, dtype: Dtype) -> bool:
        is_read_as = flat.dtype == dtype or (flat.dtype, dtype) == (_WIDE, _NARROW)
        return is_read_as and flat.is_contiguous and flat.line.device == self._device
