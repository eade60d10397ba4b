"""What was fetched, as a source: a sender beside an engine brings it into the engine's workers."""

from __future__ import annotations

from torch import Tensor

from deltasync.sync.source.tensors import NamedTensor, WeightSource
from deltasync.sync.target.copied import CopiedTarget


class CopiedSource(WeightSource):
    """The tensors that a `CopiedTarget` holds. Nothing may be received while they are sent.

    Args:
        target: The target; it must have been written once before the source is used.
    """

    def __init__(self, target: CopiedTarget) -> None:
        self._target = target

    def tensors(self) -> list[NamedTensor]:
        """The tensors, tied ones once, under all of their names."""
        found: dict[int, tuple[list[str], Tensor]] = {}
        for name, tensor in self._target.tensors.items():
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
        return [NamedTensor(tuple(names), tensor) for names, tensor in found.values()]
