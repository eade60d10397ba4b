"""The sender's copy of what every receiver is known to hold: what the next delta is taken against.

It advances in two phases. A sync reads it; the decision writes it. To bound memory, packing
may overwrite a parameter early: that parameter is then *ahead*, and if the sync is aborted it
is sent whole the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from deltasync.delta.batched import Kernels, device_for_batches
from deltasync.delta.bits import Flat, WireReader, torch_dtype
from deltasync.delta.digests import DigestLedger
from deltasync.delta.patch import Run, write_run
from deltasync.delta.shard import share_of
from deltasync.wire.messages import ParameterSpec

if TYPE_CHECKING:  # imports Triton, which need not be there
    from deltasync.delta.batched.differ import BatchedDiffer

_ALIGNMENT = 16  # bytes: what kernels read at once


class Snapshot:
    """Bits of every parameter of the layout in its wire dtype, and their digests.

    Attributes:
        specs: The layout, or shares of its parameters.
        shares: The same, as shares all of them.
        flats: One contiguous tensor a parameter, owned by the snapshot.
        differ: Compares it with a source in batches, on GPUs; None elsewhere.
        ledger: The digests of the version it holds.
        ahead: Parameters whose bits are already those of an undecided version.
        num_bytes: Bytes of the copy.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        readers: Sequence[WireReader],
        *,
        chunk_numel: int,
        device: torch.device | None = None,
        kernels: Kernels = "auto",
    ) -> None:
        """Capture the source.

        Args:
            specs: The layout, or shares of its parameters.
            readers: The source's parameters in that order.
            chunk_numel: Elements in a chunk of the ledger.
            device: Where to keep the copy; None for each parameter's own device.
            kernels: What compares.
        """
        self._own(specs, _empty_like(readers, device), chunk_numel)
        self._sources = [reader.flat.line.device for reader in readers]
        self.differ: BatchedDiffer | None = self._differ(readers, kernels)
        self.capture(readers)

    @classmethod
    def filled(cls, specs: Sequence[ParameterSpec], flats: list[Flat], *, chunk_numel: int) -> Self:
        """Take over copies that were made already. They are compared parameter by parameter."""
        self = cls.__new__(cls)
        self._own(specs, flats, chunk_numel)
        self._measure()
        return self

    def _own(self, specs: Sequence[ParameterSpec], flats: list[Flat], chunk_numel: int) -> None:
        self.specs = tuple(specs)
        self.shares = tuple(share_of(self.specs, number) for number in range(len(self.specs)))
        self.flats = flats
        self.ledger = DigestLedger(self.specs, chunk_numel=chunk_numel)
        self.ahead: set[int] = set()
        self.num_bytes = sum(flat.line.nbytes for flat in flats)
        self.differ = None
        self._sources = []

    @property
    def device(self) -> torch.device | None:
        """Where it is compared in batches; None if it is not."""
        return None if self.differ is None else self.differ.device

    def fits(self, specs: Sequence[ParameterSpec], readers: Sequence[WireReader]) -> bool:
        """Whether it can capture this source: the same layout on the same devices."""
        devices = [reader.flat.line.device for reader in readers]
        return self.specs == tuple(specs) and self._sources == devices

    def capture(self, readers: Sequence[WireReader]) -> None:
        """Take the source's bits as they are now, all of them."""
        for parameter, reader in enumerate(readers):
            for _, low, high in self.ledger.chunks(0, reader.flat.numel):
                self.flats[parameter].write(low, reader.read(low, high))
        self.ahead.clear()
        if self.differ is not None:
            self.differ.ahead[:] = False
            self.ledger.sums[:] = self.differ.digests()
            return
        self._measure()

    def keep(self, ledger: DigestLedger) -> None:
        """A version is decided: what was written belongs to it, and these are its digests."""
        self.ledger = ledger
        self.ahead.clear()

    def write(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Overwrite a run with int[count] bits."""
        write_run(self.flats[parameter], run, bits)

    def write_ahead(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Overwrite a run before its version is decided."""
        self.ahead.add(parameter)
        self.write(parameter, run, bits)

    def _measure(self) -> None:
        for parameter, flat in enumerate(self.flats):
            self.ledger.measure(parameter, flat.read)

    def _differ(self, readers: Sequence[WireReader], kernels: Kernels) -> BatchedDiffer | None:
        sources = [reader.flat for reader in readers]
        # Kernels reach pinned host memory, but not the memory of another GPU.
        elsewhere = [flat for flat in self.flats if not flat.line.is_cpu]
        device = device_for_batches([*sources, *elsewhere], kernels)
        if device is None:
            return None
        from deltasync.delta.batched.differ import BatchedDiffer
        from deltasync.delta.batched.warm_up import warm_up
        from deltasync.delta.batched.weights import BatchedWeights

        formats = frozenset((reader.flat.dtype, reader.dtype) for reader in readers)
        has_gaps = bool(self.ledger.gaps.any())
        warm_up(formats, self.ledger.chunk_numel, device, has_gaps=has_gaps)
        return BatchedDiffer(BatchedWeights(dict(enumerate(self.flats)), self.ledger, device))


def _empty_like(readers: Sequence[WireReader], device: torch.device | None) -> list[Flat]:
    """Room for each parameter in its wire dtype: views of one buffer on each device.

    Host memory beside a GPU is pinned, so that the GPU reads it at the speed of the bus.
    """
    devices = [device or reader.flat.tensor.device for reader in readers]
    flats: dict[int, Flat] = {}
    for place in dict.fromkeys(devices):
        here = [number for number, own in enumerate(devices) if own == place]
        sizes = [readers[number].flat.numel * readers[number].dtype.item_size for number in here]
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        is_pinned = place.type == "cpu" and any(readers[n].flat.line.is_cuda for n in here)
        buffer = torch.empty(ends[-1], dtype=torch.uint8, device=place, pin_memory=is_pinned)
        for number, begin, size in zip(here, [0, *ends], sizes, strict=False):
            view = buffer[begin : begin + size].view(torch_dtype(readers[number].dtype))
            flats[number] = Flat.of(view)
    return [flats[number] for number in range(len(readers))]
