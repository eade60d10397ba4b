"""The rolling scrub: finds weights that changed although no sync touched them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deltasync.delta.bits import Flat
from deltasync.delta.digests import DigestLedger


class Scrub:
    """Re-computes a share of the digests from the live weights at each call.

    After `every` calls all weights were looked at.

    Args:
        every: The share is 1/every; 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._next = 0

    def check(self, ledger: DigestLedger, flats: Mapping[int, Flat]) -> str | None:
        """The name of a parameter whose weights are not what the ledger says, or None."""
        total = len(ledger.sums)
        if not self._every or not total:
            return None
        for _ in range(-(-total // self._every)):
            chunk = self._next % total
            self._next = chunk + 1
            parameter = int(np.searchsorted(ledger.first, chunk, side="right")) - 1
            flat = flats.get(parameter)
            if flat is not None and not self._is_sound(ledger, parameter, chunk, flat):
                return ledger.specs[parameter].name
        return None

    def _is_sound(self, ledger: DigestLedger, parameter: int, chunk: int, flat: Flat) -> bool:
        low = (chunk - int(ledger.first[parameter])) * ledger.chunk_numel
        high = min(low + ledger.chunk_numel, flat.numel)
        return ledger.digest_run(parameter, flat.read(low, high), low) == int(ledger.sums[chunk])
