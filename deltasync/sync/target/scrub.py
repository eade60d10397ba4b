"""The rolling scrub: finds weights that changed although no sync touched them."""

from __future__ import annotations

import numpy as np

from deltasync.delta.digests import DigestLedger, Measure


class Scrub:
    """Re-computes a share of the digests from the live weights at each call.

    After `every` calls all weights were looked at.

    Args:
        every: The share is 1/every; 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._next = 0

    def check(self, ledger: DigestLedger, measure: Measure) -> str | None:
        """The name of a parameter whose weights are not what the ledger says, or None."""
        total = len(ledger.sums)
        if not self._every or not total:
            return None
        chunks = (self._next + np.arange(-(-total // self._every))) % total
        self._next = int(chunks[-1]) + 1
        wrong = chunks[measure(chunks) != ledger.sums[chunks]]
        return ledger.specs[int(ledger.table.parameter[wrong[0]])].name if len(wrong) else None
