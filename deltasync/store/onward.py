"""What was fetched, as a source: a sender beside an engine brings it into the engine's workers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from deltasync.store.copied import CopiedTarget
from deltasync.sync.source.tensors import NamedTensor, WeightSource


class CopiedSource(WeightSource):
    """The tensors that a `CopiedTarget` holds. Nothing may be received while they are sent.

    Args:
        target: The target; it must have been written once before the source is used.
    """

    def __init__(self, target: CopiedTarget) -> None:
        self._target, self._tensors = target, list[NamedTensor]()
        self._listed: Mapping[str, Tensor] = {}

    def tensors(self) -> list[NamedTensor]:
        """The tensors, tied ones once, under all of their names."""
        if self._listed is not self._target.tensors:
            found: dict[int, tuple[list[str], Tensor]] = {}
            for name, tensor in self._target.tensors.items():
                found.setdefault(id(tensor), ([], tensor))[0].append(name)
            self._tensors = [NamedTensor(tuple(names), one) for names, one in found.values()]
            self._listed = self._target.tensors
        return self._tensors
