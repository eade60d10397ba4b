"""A target for engines that replace parameters after loading, as they do with quantized layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.delta.bits import Live, as_bits, torch_dtype
from deltasync.engines.proof.fixed import beside, live_name
from deltasync.engines.proof.recomputed import Learnt, Recomputed
from deltasync.engines.routed import RoutedTarget
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
        device = next((one.device for one in module.parameters()), torch.device("cpu"))
        self._beside = beside(learnt.fixed, device)
        self._recomputed: Recomputed = learnt.recomputed
        self._layout = self._laid_out()

    def verify_routes(
        self, weights: Iterable[tuple[str, Tensor]], *args: Any, **options: Any
    ) -> None:
        """As of `RoutedTarget`. Fixed tensors get the values of these weights."""
        super().verify_routes(self._fixing(weights), *args, **options)

    def _fixing(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        fixed = self.learnt.fixed
        own = {other: name for name in fixed for other in self.learnt.given[name]}
        for name, tensor in weights:
            if name in own and tensor.shape == fixed[own[name]].shape:
                fixed[own[name]].copy_(tensor)
                self._beside[live_name(own[name])].copy_(tensor)
            yield name, tensor

    def finish(self, changed: Collection[int] | None = None) -> None:
        """As of `RoutedTarget`. Raises ConfigError, by name, if a fixed tensor has changed."""
        names = self._names.values() if changed is None else [self._names[n] for n in changed]
        for name in self.learnt.fixed.keys() & set(names):
            if not torch.equal(self._beside[live_name(name)].cpu(), self.learnt.fixed[name]):
                raise ConfigError(
                    f"{name!r} may not change, because the engine does not keep it by itself: "
                    "restart the engine on a checkpoint of the trainer's model"
                )
        super().finish(changed)

    def _live(self) -> dict[str, Tensor]:
        return super()._live() | self._beside | self._recomputed.beside

    def bind(self, layout: Sequence[ParameterSpec]) -> Mapping[int, Live]:
        """As of `RoutedTarget`. Notes what the engine has lost of what it computed."""
        found = super().bind(layout)
        self._recomputed.look()
        return found

    def _takes(self, live: Live, tensor: Tensor, spec: ParameterSpec) -> bool:
        """Fills what is kept beside the engine."""
        pieces = self.learnt.pieces[spec.name]
        if any(piece.live in self._recomputed.beside for piece in pieces):
            wanted = tensor.to(live.line.device, torch_dtype(spec.dtype)).contiguous()
            live.write(0, as_bits(wanted).view(-1))
        return super()._takes(live, tensor, spec)

    def _verify_computed(self) -> None:
        self._recomputed.verify(self._read)

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
