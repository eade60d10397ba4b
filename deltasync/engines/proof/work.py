"""The engine's work after loading on one layer of the second instance, run again and again.

To search what is reached from a layer takes longer than much of the engine's work. So it is
searched at the first run: what the work changes, and where it puts its results. Later runs look
there alone. Each compares what the work has changed with what it changed at first, so that a
result that goes elsewhere is noticed. Whether the work waits for other ranks is watched at the
first run, too: watching runs Python code at each operation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from deltasync.engines.proof.proving import Bits, Proof
from deltasync.engines.proof.reach import Link, News, Reach, as_tensor, at
from deltasync.engines.proof.units import Unit
from deltasync.errors import ConfigError, DeltaSyncError, EngineFailed, TargetMoved


class Work:
    """The engine's work on one layer, of which it computes something.

    Args:
        proof: The proof of the engine; the layer is one of its second instance.
        unit: The layer, what it is given, and what it makes.

    Attributes:
        unit: The same.
        live: Where the live engine has the results, by path.
        last: What the layer was given last, and the results that were copied to the live engine;
            None if it is not known to have them.

    Raises:
        ConfigError: The live engine lacks a result.
    """

    def __init__(self, proof: Proof, unit: Unit) -> None:
        self._proof, self.unit = proof, unit
        there = proof.scopes.reach((unit.scope,)).tensors
        if missing := set(unit.made) - there.keys():
            raise ConfigError(
                f"{min(missing)!r} is not there, though other layers like this one have it"
            )
        self.live = {path: there[path] for path in unit.made}
        self.last: tuple[Bits, Bits] | None = None
        # Of the first run: what was reached before it, what was processed, an outline of what that
        # changed, and the objects and keys that lead to each result.
        self._first: tuple[Reach, tuple[nn.Module, ...], News, dict[str, tuple[Link, ...]]] | None
        self._first = None

    def made(self, given: Bits) -> Bits:
        """What the work makes of these tensors: copies of its results, by path.

        The layer's other tensors are zeros meanwhile.

        Raises:
            EngineFailed: The engine raised, or has put something elsewhere than at the first run.
            TargetMoved: The live engine has replaced a result.
        """
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                results = self._results(given)
        except DeltaSyncError:
            raise
        except Exception as error:
            raise EngineFailed(
                f"the engine's work after loading on {self.unit.scope!r} raised {error!r}",
            ) from error
        for path, found in self.live.items():
            now, live = results.get(path), found.alias
            if found.is_moved:
                raise TargetMoved(f"storage of {path!r} was replaced; rejoin")
            if now is None or (now.shape, now.dtype) != (live.shape, live.dtype):
                raise EngineFailed(f"the engine's work after loading makes no {path!r} any more")
        return results

    def _results(self, given: Bits) -> Bits:
        self._proof.cold.mend()
        first = self._first
        is_known = first is not None and first[0].is_unchanged
        before, modules = first[:2] if first and is_known else self._proof.part(self.unit.scope)
        with self._proof.cold.processing(before, modules, given, is_watched=not is_known):
            news = before.news()
            if first is not None and news != first[2]:
                raise EngineFailed(
                    f"the engine's work after loading on {self.unit.scope!r} has put its results "
                    "elsewhere than before, where they would be missed: restart the engine"
                )
            if first is not None and is_known:
                ways = first[3]
            else:
                after = before.again().tensors
                ways = {path: after[path].links for path in self.live if path in after}
                if len(ways) == len(self.live):
                    self._first = before, modules, news, ways
            with DisableTorchFunctionSubclass():
                found = {path: as_tensor(at(links)) for path, links in ways.items()}
            return {path: one.detach().clone() for path, one in found.items() if one is not None}
