"""A target for engines whose weights are not where they were loaded: all are loaded each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from deltasync.delta.bits import Flat, as_bits, dtype_of, identity
from deltasync.delta.loading import Loader
from deltasync.delta.naming import suggested
from deltasync.delta.recorder import CheckpointTensor
from deltasync.errors import ConfigError, DirtyReceiver, LayoutMismatch
from deltasync.sync.source import Registered
from deltasync.sync.target import match_parameters, some_of
from deltasync.wire.messages import ParameterSpec

_SAMPLED = 16  # elements

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
        self._names = {one.name: one.names for one in checkpoint}
        self._given = dict(self._names)  # under which of them the engine takes each
        for tensor in self._copy.values():  # what no trainer has: the first sync is a full one
            tensor.view(-1).view(torch.uint8).random_(256)
        self._unknown = self._sample()

    def know(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Say what the engine was loaded with, so that a trainer that holds it need not send it.

        Raises LayoutMismatch for a tensor of another shape or dtype than the trainer's, and
        ConfigError for what the trainer alone has.
        """
        own = {name: first for first, names in self._names.items() for name in names}
        found: dict[str, tuple[str, ...]] = {}
        others: list[str] = []
        for name, tensor in weights:
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
                f"{suggested(names, others, are_sent=True)}; if the engine has no use for that, "
                f"leave it out: SenderOptions(leave_out=[{names[0]!r}])"
            )

    def prove(self, module: nn.Module) -> None:
        """Load what is known once more: that must leave the engine as it was started.

        It takes a copy of the engine's weights, beside the other, for as long as it runs.

        Raises ConfigError, by name, for what is different then, or elsewhere. Whatever it raises,
        the engine is put back.
        """
        before = _Live(module, self._device)
        wrong: list[str] | None = None
        try:
            self.finish()
            wrong = before.changed()
        finally:
            if wrong != []:
                before.put_back()
        if wrong:
            raise ConfigError(
                f"{len(wrong)} tensors of the engine, {wrong[0]!r} among them, are not what they "
                "were when it reloads the checkpoint it was started on: it cannot be kept in sync"
            )

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

    def finish(self) -> None:
        """Load all. Raises what the engine raises, and DirtyReceiver if nothing is known to load:
        the first sync is undone, and what the engine held before is gone.
        """
        if all(map(torch.equal, self._sample(), self._unknown)):
            raise DirtyReceiver(
                "what the engine was loaded with is not known: it needs a full sync"
            )
        with torch.no_grad():
            self._reload(
                (given, tensor)
                for name, tensor in self._copy.items()
                for given in self._given[name]
            )

    def _sample(self) -> list[Tensor]:
        """A few bytes of each tensor."""
        tensors = self._copy.values()
        return [t.view(-1)[:_SAMPLED].view(torch.uint8).clone() for t in tensors]


class _Live:
    """A module's parameters and buffers: where they are, and what is in them."""

    def __init__(self, module: nn.Module, device: torch.device | str) -> None:
        self._module = module
        self._registered = Registered(module)
        self._tensors = dict(_named(module))
        self._storage = {name: tensor.detach() for name, tensor in self._tensors.items()}
        self._bits = {n: t.detach().to(device, copy=True) for n, t in self._tensors.items()}

    def changed(self) -> list[str]:
        """Names of what is new, gone, elsewhere, or other to the bit."""
        now = dict(_named(self._module))
        both = self._bits.keys() & now.keys()
        return sorted(
            (self._bits.keys() ^ now.keys()) | {n for n in both if self._is_other(n, now[n])}
        )

    def _is_other(self, name: str, now: Tensor) -> bool:
        before = self._bits[name]
        return identity(now) != identity(self._storage[name]) or not torch.equal(
            as_bits(before), as_bits(now).to(before.device)
        )

    def put_back(self) -> None:
        """The same tensors, in the same storage, with the same bits."""
        self._registered.put_back()
        for name, tensor in self._tensors.items():
            tensor.data = self._storage[name]
            self._storage[name].copy_(self._bits[name])


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
