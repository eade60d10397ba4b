"""A target for engines whose weights are not where they were loaded: all are loaded each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from deltasync.delta.bits import Flat, as_bits, dtype_of
from deltasync.delta.loading import Loader
from deltasync.delta.recorder import CheckpointTensor
from deltasync.errors import ConfigError, LayoutMismatch
from deltasync.sync.target import match_parameters
from deltasync.wire.messages import ParameterSpec

Reload = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Takes a whole checkpoint and works on it as when the engine was started."""


class ReloadedTarget:
    """An engine that packs, shuffles, quantises or computes what it loads: slow, but it may.

    It keeps a copy of the checkpoint. Syncs are written to that, and digests are taken of it; then,
    in the pause, the engine is given all of it. What travels is still what changed; the pause
    grows with the model. What the engine makes of the checkpoint is its own affair; `prove` looks
    whether it makes the same of it each time.

    Args:
        checkpoint: Names, shapes and dtypes of the tensors that `reload` takes.
        reload: The engine's. Tensors that it is given are not its own.
        device: Where the copy is kept.
    """

    def __init__(
        self,
        checkpoint: Sequence[CheckpointTensor],
        reload: Reload,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._reload, self._device = reload, device
        self._copy = {
            one.name: torch.empty(one.shape, dtype=one.dtype, device=device) for one in checkpoint
        }
        for tensor in self._copy.values():  # what no trainer has: the first sync is a full one
            tensor.view(-1).view(torch.uint8).random_(256)

    def know(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Say what the engine was loaded with, so that a trainer that holds it need not send it.

        Raises LayoutMismatch for a tensor of another shape or dtype than the trainer's.
        """
        for name, tensor in weights:
            kept = self._copy.get(name)
            if kept is None:
                continue
            if (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                raise LayoutMismatch(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} was loaded, the trainer has "
                    f"{kept.dtype} {tuple(kept.shape)}"
                )
            kept.copy_(tensor)

    def prove(self, module: nn.Module) -> None:
        """Load what is known once more: that must leave the engine as it was started.

        It takes a copy of the engine's weights, beside the other, for as long as it runs.

        Raises ConfigError, by name, for what is different then; that is put back.
        """
        before = {name: tensor.to(self._device, copy=True) for name, tensor in _live(module)}
        self.finish()
        after = dict(_live(module))
        wrong = [name for name in before if not _is_same(before[name], after.get(name))]
        for name in wrong:
            if name in after and after[name].shape == before[name].shape:
                after[name].copy_(before[name])
        if wrong:
            raise ConfigError(
                f"{len(wrong)} tensors of the engine, {wrong[0]!r} among them, are not what they "
                "were when it reloads the checkpoint it was started on: it cannot be kept in sync"
            )

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The checkpoint's tensors."""
        return tuple(
            ParameterSpec((name,), tuple(tensor.shape), dtype_of(tensor))
            for name, tensor in self._copy.items()
        )

    def bind(self, layout: Sequence[ParameterSpec]) -> Mapping[int, Flat]:
        """Find each parameter of the layout in the copy."""
        numbers = match_parameters(self.parameters(), layout)
        return {
            number: Flat.of(tensor, name=name)
            for number, (name, tensor) in zip(numbers, self._copy.items(), strict=True)
        }

    def check_unmoved(self) -> None:
        """The copy stays where it is."""

    def loader(self) -> Loader | None:
        """None: the copy holds what was sent."""
        return None

    def finish(self) -> None:
        """Load all. Raises what the engine raises."""
        with torch.no_grad():
            self._reload(iter(self._copy.items()))


def _live(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield name, tensor.detach()


def _is_same(before: Tensor, after: Tensor | None) -> bool:
    """Whether two tensors are alike to the bit."""
    if after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    return torch.equal(as_bits(before), as_bits(after.to(before.device)))
