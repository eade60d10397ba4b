"""A target for engines whose weights are not where they were loaded: all are loaded each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from deltasync.delta.bits import Flat, dtype_of
from deltasync.delta.routes.loading import Loader
from deltasync.delta.routes.naming import suggested
from deltasync.delta.routes.recorder import CheckpointTensor
from deltasync.errors import ConfigError, DirtyReceiver, LayoutMismatch
from deltasync.sync.proof.cold import refusing_failures
from deltasync.sync.proof.proved import in_place, matches, prove_reload, refuse_unsent
from deltasync.sync.proof.proving import Proof, under
from deltasync.sync.target.module import match_parameters, some_of
from deltasync.wire.messages import ParameterSpec

_SAMPLED = 16  # elements

Reload = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Takes a whole checkpoint and works on it as when the engine was started."""


class ReloadedTarget:
    """An engine that packs, shuffles, quantises or computes what it loads: slow, but it may.

    It keeps a copy of the checkpoint. Syncs are written to that, and digests are taken of it; then,
    in the pause, the engine is given all of it. What travels is still what changed; the pause
    grows with the model. What the engine makes of the checkpoint is its own affair;
    `verify_reload` looks whether it makes the same of it each time.

    Args:
        checkpoint: Names, shapes and dtypes of the tensors that `reload` takes.
        reload: The engine's. Tensors that it is given are not its own.
        module: The engine's model. What reloading puts elsewhere is written to where it was.
        device: Where the copy is kept.
    """

    def __init__(
        self,
        checkpoint: Sequence[CheckpointTensor],
        reload: Reload,
        *,
        module: nn.Module | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._reload, self._module = reload, module
        self._copy = {
            one.name: torch.empty(one.shape, dtype=one.dtype, device=device) for one in checkpoint
        }
        self._names = {one.name: one.names for one in checkpoint}
        self._given = dict(self._names)  # under which of them the engine takes each
        for tensor in self._copy.values():  # what no trainer has: the first sync is a full one
            tensor.view(-1).view(torch.uint8).random_(256)
        self._unknown = self._sample()
        self._loaded: list[CheckpointTensor] = []

    def set_loaded_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Say what the engine was loaded with, so that a trainer that holds it need not send it.

        Raises LayoutMismatch for a tensor of another shape or dtype than the trainer's, and
        ConfigError for what the trainer alone has.
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
            found[first] = (*found.get(first, ()), name)
            if (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                raise LayoutMismatch(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} was loaded, the trainer has "
                    f"{kept.dtype} {tuple(kept.shape)}: start the engine on a checkpoint of the "
                    "trainer's model in its dtypes, or give SenderOptions(wire_dtypes=...)"
                )
            kept.copy_(tensor)
        self._given |= found
        if missing := self._copy.keys() - found.keys():
            names = sorted(missing)
            raise ConfigError(
                f"the checkpoint that the engine was started on has no {some_of(names)}"
                f"{suggested(names, others, are_sent=True)}: start the engine on a checkpoint that "
                "has it, as the trainer's model is saved"
            )

    @refusing_failures()
    def verify_reload(self, proof: Proof, *, keep: Collection[str] = ()) -> None:
        """Reload other weights, then what is known once more: see `prove_reload`.

        It takes a copy of all that the engine computes with, beside the other, for as long as it
        runs. The engine must not run; it holds the same weights afterwards.

        Args:
            proof: Of the engine.
            keep: Patterns of checkpoint tensors that may stay as they are, as of `fnmatch`.

        Raises:
            ConfigError: By name, for what would be stale, or is different when the engine reloads
                what it was started on, and for what the trainer does not send.
            DirtyReceiver: The engine could not be put back.
        """
        loaded = [one for one in self._loaded if not matches(one.name, keep)]
        refuse_unsent(proof, loaded, {name for names in self._names.values() for name in names})
        prove_reload(proof, self._copy, self._given, self._reload)

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The checkpoint's tensors."""
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
        """The copy stays where it is."""

    def loader(self) -> Loader | None:
        """None: the copy holds what was sent."""
        return None

    def finish(self, changed: Collection[int] | None = None) -> None:
        """Load all, into the storage where it was.

        Raises what the engine raises, and DirtyReceiver if nothing is known to load: the first sync
        is undone, and what the engine held before is gone.
        """
        if all(map(torch.equal, self._sample(), self._unknown)):
            raise DirtyReceiver(
                "what the engine was loaded with is not known: it needs a full sync"
            )
        with torch.no_grad(), in_place(self._module):
            self._reload(under(self._given, self._copy.items()))

    def _sample(self) -> list[Tensor]:
        """A few bytes of each tensor."""
        tensors = self._copy.values()
        return [t.view(-1)[:_SAMPLED].view(torch.uint8).clone() for t in tensors]
