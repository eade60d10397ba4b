"""An extension of vLLM's workers: faults that tests plant in them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from deltasync.errors import TargetMoved


class Faults:
    """Takes the calls of a test; vLLM lets its worker inherit from this."""

    weight_transfer_engine: Any
    rank: int

    def fail(self, where: str, rank: int = 0) -> None:
        """Let the next update fail.

        Args:
            where: "begin" (before anything is written), "write" (after the weights were written,
                which are put back), "undo" (and they are not put back), "end" (all is written).
            rank: The worker that fails.
        """
        if self.rank != rank:
            return
        if where == "begin":
            _failing(self.weight_transfer_engine, "start_weight_update")
        elif where == "end":
            _failing(self.weight_transfer_engine, "finish_weight_update")
        else:
            weights = self.weight_transfer_engine._worker._receiver._weights
            _failing(weights.target, "finish", 1 + (where == "undo"))


def _failing(owner: Any, name: str, times: int = 1) -> None:
    method, left = getattr(owner, name), [times]

    def call(changed: Collection[int] | None = None) -> None:
        left[0] -= 1
        if left[0] < 0:
            method(*(() if changed is None else (changed,)))
            return
        raise TargetMoved("planted")

    setattr(owner, name, call)
