"""A target for engines that move or compute their weights: each sync reloads all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from deltasync.delta.bits import Flat, dtype_of
from deltasync.delta.modes import in_plain_mode
from deltasync.engines.proof.cold import FAILURES, refusing_failures
from deltasync.engines.proof.proved import (
    in_place,
    matches,
    prove_reload,
    refuse_missing,
    refuse_unsent,
)
from deltasync.engines.proof.proving import Proof, under
from deltasync.engines.proof.reach import same_bits
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.engines.running import as_made, raise_lack_of_memory
from deltasync.errors import ConfigError, DirtyReceiver, LayoutMismatch
from deltasync.sync.target.base import WeightTarget, match_parameters
from deltasync.wire.messages import ParameterSpec

_SAMPLED = 16  # elements
_ROUNDED = {torch.float64, torch.float32, torch.bfloat16}  # to each other, and over one range

Reload = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Loads a whole checkpoint and processes it as at the engine's start."""


class ReloadedTarget(WeightTarget):
    """An engine that packs, shuffles, quantises or computes what it loads. This is slow.

    The target keeps a copy of the checkpoint. Syncs are written to the copy, and digests are taken
    of it; in the pause the engine loads all of it. Only changes are sent, but the pause grows with
    the model. `verify_reload` checks that the engine makes the same of a checkpoint each time.

    Args:
        checkpoint: Names, shapes and dtypes of the tensors that `reload` takes.
        reload: The engine's reload. It does not own the tensors that it gets.
        module: The engine's model. Tensors that a reload puts elsewhere are written back to their
            old storage.
        device: Where the copy is kept.
    """

    @in_plain_mode
    def __init__(
        self,
        checkpoint: Sequence[CheckpointTensor],
        reload: Reload,
        *,
        module: nn.Module | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._reload, self._module = as_made(module, reload), module
        self._copy = {
            one.name: torch.empty(one.shape, dtype=one.dtype, device=device) for one in checkpoint
        }
        self._names = {one.name: one.names for one in checkpoint}
        self._given = dict(self._names)  # the names by which the engine takes each
        self._loaded: list[CheckpointTensor] = []
        self.forget()

    def forget(self) -> None:
        """Know nothing of the engine's weights any more: the next sync is a full one."""
        for tensor in self._copy.values():  # no trainer has these
            tensor.view(-1).view(torch.uint8).random_(256)
        self._unknown = self._sample()

    def set_loaded_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the weights that the engine was loaded with; a trainer that holds them sends nothing.

        Masters are sent in the dtype that was loaded, as to engines with routes.

        Raises LayoutMismatch for a tensor whose shape or dtype does not fit the trainer's, and
        ConfigError for tensors that only the trainer has, or has tied.
        """
        own = {name: first for first, names in self._names.items() for name in names}
        found: dict[str, tuple[str, ...]] = {}
        others: list[str] = []
        for name, tensor in weights:
            self._loaded.append(CheckpointTensor(name, tuple(tensor.shape), tensor.dtype))
            if (first := own.get(name)) is None:
                others.append(name)
                continue
            kept = self._copy[first]
            both = {kept.dtype, tensor.dtype}
            if kept.shape != tensor.shape or not (len(both) == 1 or both <= _ROUNDED):
                raise LayoutMismatch(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} was loaded, the trainer has "
                    f"{kept.dtype} {tuple(kept.shape)}: start on what it saves or set `wire_dtypes`"
                )
            if first in found and not same_bits(kept, tensor):
                raise ConfigError(
                    f"{found[first][0]!r} and {name!r} are tied at the trainer, and differ in what "
                    "the engine was started on: untie them there, or start it on what that saves"
                )
            found[first] = (*found.get(first, ()), name)
            if kept.itemsize > tensor.itemsize:
                kept = self._copy[first] = torch.empty_like(kept, dtype=tensor.dtype)
            kept.copy_(tensor)
        self._given |= found
        refuse_missing(self._copy.keys() - found.keys(), others)

    @in_plain_mode
    @refusing_failures()
    def verify_reload(self, proof: Proof, *, keep: Collection[str] = ()) -> None:
        """Reload other weights, then the engine's own again: see `prove_reload`.

        While it runs, this takes a second copy of everything that the engine computes with. The
        engine must not run meanwhile; it holds the same weights afterwards.

        Args:
            proof: The proof for this engine.
            keep: Patterns, as in `fnmatch`, of checkpoint tensors that may stay as they are.

        Raises:
            ConfigError: Names what would be stale, what differs after the engine reloads its own
                weights, and what the trainer does not send.
            DirtyReceiver: The engine's weights could not be restored.
        """
        loaded = [one for one in self._loaded if not matches(one.name, keep)]
        refuse_unsent(proof, loaded, {name for names in self._names.values() for name in names})
        prove_reload(proof, self._copy, self._given, self._tried)

    def reload(self) -> None:
        """Let the engine load again what it holds, which changes nothing, to see that it can.

        Raises ConfigError if it cannot; the engine is then as it was.
        """
        with torch.no_grad(), in_place(self._module):
            self._tried(under(self._given, self._copy.items()))

    def _tried(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            self._reload(weights)
        except FAILURES as error:
            raise_lack_of_memory(error)
            raise ConfigError(
                f"the engine's weights cannot be reloaded, since that raised {error!r}"
            ) from error

    def held(self) -> dict[str, Tensor]:
        """What the engine was given last, by each name by which it takes it."""
        return dict(under(self._given, self._copy.items()))

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Return the checkpoint's tensors."""
        return tuple(
            ParameterSpec(self._names[name], tuple(tensor.shape), dtype_of(tensor, name=name))
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
        """Do nothing: the copy does not move."""

    def finish(self, changed: Collection[int] | None = None) -> None:
        """Reload everything into its old storage.

        Raises what the engine raises, and DirtyReceiver if there is nothing known to load: the
        first sync was undone, and the engine's earlier weights are gone.
        """
        if all(map(torch.equal, self._sample(), self._unknown)):
            raise DirtyReceiver(
                "what the engine was loaded with is not known: it needs a full sync"
            )
        with in_place(self._module):
            self._reload(under(self._given, self._copy.items()))

    def _sample(self) -> list[Tensor]:
        """A few bytes of every tensor."""
        tensors = self._copy.values()
        return [t.view(-1)[:_SAMPLED].view(torch.uint8).clone() for t in tensors]
