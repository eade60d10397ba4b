"""The engine's work after loading on one module of the second instance, run again and again.

To search what is reached from a module takes longer than much of the engine's work. So it is
searched at the first run: what the work changes, and where it puts its results. Later runs look
there alone. Each compares what the work has changed with what it changed at first, so that a
result that goes elsewhere is noticed. Whether the work waits for other ranks is watched at the
first run, too: watching runs Python code at each operation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from deltasync.engines.proof.proving import Bits, Proof
from deltasync.engines.proof.reach import Link, News, Reach, as_tensor, at
from deltasync.errors import EngineFailed


class Again:
    """Runs the engine's work on one module.

    Args:
        proof: The proof of the engine; the module is one of its second instance.
        module: Its name.
        results: Paths of the results.
    """

    def __init__(self, proof: Proof, module: str, results: Sequence[str]) -> None:
        self._proof, self._module, self._results = proof, module, results
        # Of the first run: what was reached before it, what was processed, an outline of what that
        # changed, and the objects and keys that lead to each result.
        self._first: tuple[Reach, tuple[nn.Module, ...], News, dict[str, tuple[Link, ...]]] | None
        self._first = None

    def made(self, given: Bits) -> dict[str, Tensor]:
        """What the work makes of these tensors: copies of its results, by path.

        The module's other tensors are zeros meanwhile. A result that was not there at the first
        run is left out.

        Raises:
            EngineFailed: The work has put something elsewhere than at the first run.
            Exception: What the engine raises.
        """
        self._proof.cold.mend()
        first = self._first
        is_known = first is not None and first[0].is_unchanged
        before, modules = first[:2] if first and is_known else self._proof.part(self._module)
        with self._proof.cold.processing(before, modules, given, is_watched=not is_known):
            news = before.news()
            if first is not None and news != first[2]:
                raise EngineFailed(
                    f"the engine's work after loading on {self._module!r} has put its results "
                    "elsewhere than before, where they would be missed: restart the engine"
                )
            if first is not None and is_known:
                ways = first[3]
            else:
                after = before.again().tensors
                ways = {path: after[path].links for path in self._results if path in after}
                if len(ways) == len(self._results):
                    self._first = before, modules, news, ways
            with DisableTorchFunctionSubclass():
                found = {p: as_tensor(at(w[0][0], [k for _, k in w])) for p, w in ways.items()}
            return {path: one.detach().clone() for path, one in found.items() if one is not None}
