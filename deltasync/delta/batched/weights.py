"""Where weights lie, as the kernels read it, and their digests from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.packing import origins_of
from deltasync.delta.bits import Live
from deltasync.delta.digests import DigestLedger
from deltasync.delta.kernels import triton as kernels

ALIGNMENT = 16
"""Bytes that kernels read at once, and elements; every array of an upload begins at a multiple."""


class BatchedWeights:
    """Flat contiguous weights by chunk.

    Attributes:
        device: Where kernels run.
        ledger: What says which chunks there are; its sums are not looked at.
        table: The chunks.
        pointers: int64[parameters], addresses; 0 for one that is not held.
        item_sizes: int64[chunks], bytes of an element.
        origins: int64[chunks], what indices of a chunk are relative to.
        addresses: int64[chunks], of each chunk's first element.
        addresses_there, starts, numels, keys: The columns of the chunks on the device.
    """

    def __init__(
        self, flats: Mapping[int, Live], ledger: DigestLedger, device: torch.device
    ) -> None:
        """Look up where the weights are.

        Args:
            flats: The weights by parameter; contiguous, on `device` or in pinned host memory. Not
                owned: they must outlive this object.
            ledger: Whose chunks are meant.
            device: Where kernels run.
        """
        self.device, self.ledger = device, ledger
        self._flats = flats
        table = self.table = ledger.table
        self.item_sizes = ledger.item_sizes[table.parameter]
        self.origins = origins_of(table)
        self.pointers = np.zeros(len(ledger.specs), np.int64)
        for parameter, flat in flats.items():
            self.pointers[parameter] = flat.line.data_ptr()
        self.addresses = self.addresses_of(self.pointers, self.item_sizes)
        self.addresses_there, self.starts, self.keys, self.numels = upload(
            [self.addresses, table.start, ledger.keys[table.parameter].view(np.int64), table.numel],
            device,
        )

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
        found = np.zeros(len(chunks), np.uint64)
        with device_of(self.device):
            for item_size in np.unique(self.item_sizes[chunks]).tolist():
                these = np.flatnonzero(self.item_sizes[chunks] == item_size)
                found[these] = self._digests(chunks[these], item_size)
        return found

    def _digests(self, chunks: NDArray[np.int64], item_size: int) -> NDArray[np.uint64]:
        (there,) = upload([chunks], self.device)
        sums = torch.zeros(len(chunks), dtype=torch.int64, device=self.device)
        each = blocks_in(self.table.numel[chunks])
        kernels.digest[(len(chunks) * each,)](
            self.addresses_there,
            self.starts,
            self.numels,
            self.keys,
            there,
            sums,
            each,
            TYPE=kernels.TYPES[item_size],
            ALIGNED=not ((self.addresses | self.table.numel)[chunks] % ALIGNMENT).any(),
            BLOCK=kernels.SPAN,
            num_warps=4,
        )
        return sums.cpu().numpy().view(np.uint64)


def blocks_in(numels: NDArray[np.int64]) -> int:
    """The most programs of a dense kernel that one of these runs of elements takes."""
    return -(-int(numels.max()) // kernels.SPAN)


def device_of(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in one copy that the host does not wait for."""
    # Kernels are compiled for addresses that are multiples of ALIGNMENT.
    begins = [0, *accumulate(array.size + array.size % 2 for array in arrays)]
    host = torch.empty(begins[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, begin in zip(arrays, begins, strict=False):
        view[begin : begin + array.size] = array.reshape(-1)
    there = host.to(device, non_blocking=True)
    return [
        there[begin : begin + array.size].view(array.shape)
        for array, begin in zip(arrays, begins, strict=False)
    ]


class Numbers:
    """A tensor's values on their way to the host, as they are on the current stream now."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
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
