"""The engine's work after loading on one module of the second instance, run again and again.

To search what is reached from a module takes longer than much of the engine's work. So it is
searched at the first run: what the work changes, and where it puts its results. Later runs look
there alone. Each compares what the work has changed with what it changed at first, so that a
result that goes elsewhere is noticed. Whether the work waits for other ranks is watched at the
first run, too: watching runs Python code at each operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from deltasync.engines.proof.proving import Bits, Proof
from deltasync.engines.proof.reach import News, Reach, as_tensor, at
from deltasync.errors import EngineFailed


class Again:
    """Runs the engine's work on one module.

    Args:
        proof: The proof of the engine; the module is one of its second instance.
        module: Its name.
        made: Paths of the results.
    """

    def __init__(self, proof: Proof, module: str, made: Sequence[str]) -> None:
        self._proof, self._module, self._paths = proof, module, made
        self._found: _Found | None = None

    def made(self, given: Bits) -> dict[str, Tensor]:
        """What the work makes of these tensors: copies of its results, by path.

        The module's other tensors are zeros meanwhile. A result that was not there at the first
        run is left out.

        Raises:
            EngineFailed: The work has put something elsewhere than at the first run.
            Exception: What the engine raises.
        """
        self._proof.cold.mend()
        found = self._found
        is_known = found is not None and found.before.is_unchanged
        if found is None or not is_known:
            found = _Found(*self._proof.part(self._module))
        with self._proof.cold.processing(
            found.before, found.modules, given, is_watched=not is_known
        ):
            news = found.before.news()
            if self._found is not None and news != self._found.news:
                raise EngineFailed(
                    f"the engine's work after loading on {self._module!r} has put its results "
                    "elsewhere than before, where they would be missed: restart the engine"
                )
            if not is_known and found.search(self._paths, news):
                self._found = found
            return {
                path: now.detach().clone()
                for path in found.places
                if (now := found.now(path)) is not None
            }


class _Found:
    """What was found at a run.

    Args:
        before: What is reached from the module before the work.
        modules: What is processed.

    Attributes:
        before, modules: The same.
        news: An outline of what the work changes.
        places: By path of each result, the root that it is reached from, and the keys on the way.
    """

    def __init__(self, before: Reach, modules: Sequence[nn.Module]) -> None:
        self.before, self.modules = before, modules
        self.news: News = []
        self.places: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def search(self, paths: Sequence[str], news: News) -> bool:
        """Find out where the work has put its results. Returns whether all are there."""
        after = self.before.again().tensors
        ways = {path: after[path].links for path in paths if path in after}
        self.news = news
        self.places = {path: (way[0][0], tuple(k for _, k in way)) for path, way in ways.items()}
        return len(ways) == len(paths)

    def now(self, path: str) -> Tensor | None:
        """The result that is there; None if there is none."""
        with DisableTorchFunctionSubclass():
            return as_tensor(at(*self.places[path]))
