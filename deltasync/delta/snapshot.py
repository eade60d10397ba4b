"""The sender's copy of what every receiver is known to hold: what the next delta is taken against.

It advances in two phases. A sync reads it; the decision writes it. To bound memory, packing
may overwrite a parameter early: that parameter is then *ahead*, and if the sync is aborted it
is sent whole the next time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, WireReader, torch_dtype
from deltasync.delta.digests import DigestLedger
from deltasync.delta.patch import Run, write_run
from deltasync.wire.messages import ParameterSpec


class Snapshot:
    """Bits of every parameter of the layout in its wire dtype, and their digests.

    Attributes:
        specs: The layout.
        flats: One contiguous tensor a parameter, owned by the snapshot.
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
    ) -> None:
        """Capture the source.

        Args:
            specs: The layout.
            readers: The source's parameters in that order.
            chunk_numel: Elements in a chunk of the ledger.
            device: Where to keep the copy; None for each parameter's own device.
        """
        self.specs = tuple(specs)
        self.flats = [_empty_like(reader, device) for reader in readers]
        self.ledger = DigestLedger(self.specs, chunk_numel=chunk_numel)
        self.ahead: set[int] = set()
        self.num_bytes = sum(flat.line.nbytes for flat in self.flats)
        self.capture(readers)

    def capture(self, readers: Sequence[WireReader]) -> None:
        """Take the source's bits as they are now, all of them."""
        for parameter, reader in enumerate(readers):
            for _, low, high in self.ledger.chunks(0, reader.flat.numel):
                self.flats[parameter].write(low, reader.read(low, high))
            self.ledger.measure(parameter, self.flats[parameter].read)
        self.ahead.clear()

    def write(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Overwrite a run with int[count] bits."""
        write_run(self.flats[parameter], run, bits)

    def write_ahead(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Overwrite a run before its version is decided."""
        self.ahead.add(parameter)
        self.write(parameter, run, bits)


def _empty_like(reader: WireReader, device: torch.device | None) -> Flat:
    return Flat.of(
        torch.empty(
            reader.flat.numel,
            dtype=torch_dtype(reader.dtype),
            device=device or reader.flat.tensor.device,
        )
    )
