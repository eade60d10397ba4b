"""A target for engines that replace parameters after loading, as they do with quantized layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from deltasync.delta.routes.recorder import CheckpointTensor, Recording
from deltasync.errors import ConfigError
from deltasync.sync.target.routed import RoutedTarget


class LearntTarget(RoutedTarget):
    """An engine whose own loader cannot load it a second time.

    Its routes were learnt in a second instance of the model. They lead to where the engine keeps
    its parameters now, which is where everything is written: a full sync too. What the engine pads
    stays as it is.

    Args:
        module: The engine's model. Its parameters must stay where they are.
        checkpoint: Names, shapes and dtypes of the tensors that the engine's loader takes.
        learnt: What `learn_routes` returned.

    Attributes:
        learnt: The same.
    """

    def __init__(
        self, module: nn.Module, checkpoint: Sequence[CheckpointTensor], learnt: Recording
    ) -> None:
        super().__init__(module, checkpoint, load=lambda weights: None)
        self.learnt = learnt
        self._layout = self._laid_out()

    def _watched(self) -> Recording:
        if self._laid_out() != self._layout:
            raise ConfigError(
                "the engine has laid out its parameters in another way since routes to them were "
                "learnt: restart it"
            )
        return self.learnt

    def _laid_out(self) -> dict[str, tuple[object, ...]]:
        """What routes depend on, by parameter."""
        return {
            name: (one.shape, one.stride(), one.storage_offset(), one.dtype)
            for name, one in self._live().items()
        }

    def loader(self) -> None:
        """None: the loader does not know the parameters that replaced its own."""
        return
