"""A target for engines that replace parameters after loading, as they do with quantized layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from deltasync.delta.bits import Live, as_bits, torch_dtype
from deltasync.engines.proof.recomputed import Learnt
from deltasync.engines.routed import RoutedTarget, Routes
from deltasync.engines.routes.recorder import CheckpointTensor, Recording
from deltasync.errors import ConfigError
from deltasync.wire.messages import ParameterSpec


class LearntTarget(RoutedTarget):
    """An engine whose own loader cannot load it a second time.

    Its routes were learnt in a second instance of the model. They lead to where the engine keeps
    its parameters now, which is where everything is written: a full sync too. What the engine pads
    stays as it is. Small tensors of which the engine computes something are written beside it, and
    what it computes of them is computed again after that, by its own code: all of it before any is
    copied to the engine. Fixed tensors are kept beside the engine, too; they must have the values
    that it was started on.

    Args:
        module: The engine's model. Its parameters must stay where they are.
        checkpoint: Names, shapes and dtypes of the tensors that the engine's loader takes.
        learnt: What `learn_routes` returned.

    Attributes:
        learnt: The same.
    """

    def __init__(
        self, module: nn.Module, checkpoint: Sequence[CheckpointTensor], learnt: Learnt
    ) -> None:
        super().__init__(module, checkpoint, load=lambda weights: None)
        self.learnt = learnt
        self._recomputed = learnt.recomputed
        self._layout = self._laid_out()

    def routes(self) -> dict[str, Routes]:
        """As of `RoutedTarget`, but those of fixed tensors, which are read back each time."""
        fixed = {other for name in self.learnt.fixed for other in self.learnt.given[name]}
        return {name: one for name, one in super().routes().items() if name not in fixed}

    def _live(self) -> dict[str, Tensor]:
        return super()._live() | self.learnt.recomputed.beside

    def bind(self, layout: Sequence[ParameterSpec]) -> Mapping[int, Live]:
        """As of `RoutedTarget`. Notes what the engine has lost of what it computed."""
        found = super().bind(layout)
        self.learnt.recomputed.look()
        return found

    def _takes(self, live: Live, tensor: Tensor, spec: ParameterSpec) -> bool:
        """Fills what is kept beside the engine."""
        recomputed = self.learnt.recomputed
        is_beside = any(one.live in recomputed.beside for one in self.learnt.pieces[spec.name])
        if is_beside and tensor.numel() == spec.numel:
            wanted = tensor.to(live.line.device, torch_dtype(spec.dtype)).contiguous()
            live.write(0, as_bits(wanted).view(-1))
            recomputed.fix(spec.name)
        return super()._takes(live, tensor, spec)

    def _verify_computed(self) -> None:
        self.learnt.recomputed.verify(self._read)

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
