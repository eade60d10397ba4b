"""What an engine's work after loading computes of small tensors alone, found by running it.

Scales of quantized layers are inverted, merged, rounded and multiplied after loading. Their values
are not found by moving elements; but the engine's own code makes them again from the small tensors
that it loaded, whatever the large ones hold. Which results depend on which tensors is found in a
second instance of a layer, by changing one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from deltasync.delta.bits import as_bits, identity, storage_of
from deltasync.delta.memory import raise_lack_of_memory
from deltasync.engines.proof.again import Again
from deltasync.engines.proof.cold import FAILURES, with_room
from deltasync.engines.proof.proving import Bits, Proof, same_bits, scope_of
from deltasync.engines.routes.learning import PROBES, probed
from deltasync.errors import ConfigError

_SMALL = 4  # a tensor is small if it has one of so many bytes of its module, or less
_FACTOR = 64  # by which values become larger and smaller; FP8 holds it
Run = Callable[[str, Bits], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Unit:
    """A module of which the engine's work computes something from small tensors alone.

    Attributes:
        module: Its name.
        given: Names of these tensors, as they were loaded.
        made: Paths of what is computed.
    """

    module: str
    given: tuple[str, ...]
    made: tuple[str, ...]

    def renamed(self, scope: str, other: str) -> Unit:
        """The same unit of another layer."""
        module, *names = (
            other + name.removeprefix(scope) for name in (self.module, *self.given, *self.made)
        )
        count = len(self.given)
        return Unit(module, tuple(names[:count]), tuple(names[count:]))


def small_of(loaded: Mapping[str, Tensor]) -> set[str]:
    """The names of tensors that are small beside others of their module.

    Args:
        loaded: What is loaded into a layer, by name.
    """
    total = defaultdict[str, int](int)
    for name, tensor in loaded.items():
        total[_owner(name)] += _num_bytes(tensor)
    return {n for n, t in loaded.items() if _num_bytes(t) * _SMALL <= total[_owner(n)]}


def units_of(
    proof: Proof,
    scope: str,
    loaded: Mapping[str, Tensor],
    *,
    computed: Collection[str],
    moved: Collection[str],
) -> tuple[Unit, ...]:
    """What a layer computes of small tensors.

    Args:
        proof: The proof of the engine.
        scope: The layer.
        loaded: What is loaded into it, by name; shapes and dtypes alone are read.
        computed: Names of the small ones to which no route leads.
        moved: Names of the live tensors to which routes lead.

    Raises:
        ConfigError: What becomes of `computed` depends on more than small tensors of one module.
    """
    return with_room(
        proof.cold.device,
        lambda device: _Search(proof, scope, loaded, moved, device).units(computed),
    )


class _Search:
    """The search in one layer."""

    def __init__(
        self,
        proof: Proof,
        scope: str,
        loaded: Mapping[str, Tensor],
        moved: Collection[str],
        device: torch.device,
    ) -> None:
        self._proof, self._scope, self._loaded = proof, scope, loaded
        self._device = device  # of the values that are tried
        live = proof.scopes.reach((scope,)).tensors
        self._like = {path: (f.alias.shape, f.alias.dtype) for path, f in live.items()}
        small = sum(_num_bytes(loaded[name]) for name in small_of(loaded))
        self._most = max(_FACTOR << 10, _SMALL * small)  # bytes of a result that is looked at
        self._run: Run = partial(self._made, moved)
        self._given: list[Bits] = []
        self._full: list[dict[str, Tensor]] = []

    def units(self, computed: Collection[str]) -> tuple[Unit, ...]:
        for seed in (0, 1):
            self._add({n: _drawn(one, seed, self._device) for n, one in self._loaded.items()})
        for number in range(PROBES):
            given = {n: probed(one, number, self._device) for n, one in self._loaded.items()}
            try:
                self._add(given)
            except FAILURES as error:  # not with such values
                raise_lack_of_memory(error)
                continue
        if not computed and not any(_differing(self._full[0], one) for one in self._full[1:]):
            return ()
        made_of = {name: self._made_of(name) for name in sorted(small_of(self._loaded))}
        found: list[Unit] = []
        for owner, names in self._owners(made_of).items():
            made = tuple(sorted(set().union(*(made_of[name] for name in names))))
            unit = self._smallest(Unit(owner, tuple(names), made))
            if unit is not None:
                found.append(unit)
            elif wrong := set(names) & set(computed):
                raise ConfigError(
                    f"is computed by the engine's work after loading, and {made[0]!r} depends on "
                    f"more than {min(wrong)!r} and other small tensors of its module"
                )
        return tuple(found)

    def _add(self, given: Bits) -> None:
        """Values of all tensors, and what is made of them; of large ones the first are kept."""
        made = self._run(self._scope, given)
        names = small_of(self._loaded) if self._given else given
        self._given.append({name: given[name] for name in names})
        self._full.append(made)

    def _made_of(self, name: str) -> set[str]:
        """Paths of what changes with a tensor alone."""
        found: set[str] = set()
        for other in _others(self._given[0][name]):
            try:
                now = self._run(self._scope, {**self._given[0], name: other})
            except FAILURES as error:  # not with such values
                raise_lack_of_memory(error)
                continue
            found |= _differing(self._full[0], now)
        return found

    def _owners(self, made_of: Mapping[str, set[str]]) -> dict[str, list[str]]:
        """Tensors by their module, or by the layer if modules make something together."""
        owners = defaultdict[str, list[str]](list)
        makers = defaultdict[str, set[str]](set)
        for name, made in made_of.items():
            for path in made:
                makers[path].add(_owner(name))
        shared = {owner for several in makers.values() if len(several) > 1 for owner in several}
        for name, made in made_of.items():
            if made:
                owners[self._scope if _owner(name) in shared else _owner(name)].append(name)
        return owners

    def _smallest(self, unit: Unit) -> Unit | None:
        """The innermost module of which the work makes the same, given no other tensors."""
        module = unit.module
        while scope_of(module) == self._scope:
            if module in self._proof.scopes.below(self._scope) and self._is_enough(
                replace(unit, module=module)
            ):
                return replace(unit, module=module)
            if module == self._scope:
                break
            module = _owner(module)
        return None

    def _is_enough(self, unit: Unit) -> bool:
        for given, full in zip(self._given, self._full, strict=True):
            try:
                again = Again(self._proof, unit.module, unit.made)
                alone = again.made({name: given[name] for name in unit.given})
            except FAILURES as error:
                raise_lack_of_memory(error)
                return False
            if any(p not in alone or not same_bits(alone[p], full[p]) for p in unit.made):
                return False
        return True

    def _made(self, moved: Collection[str], module: str, given: Bits) -> dict[str, Tensor]:
        """What the live layer has too, once, without what is large or lies where routes lead."""
        with self._proof.processing(module, given) as after:
            founds = {path: found.alias for path, found in after.tensors.items()}
            routed = {storage_of(founds[name]) for name in moved if name in founds}
            made: dict[tuple[object, ...], tuple[str, Tensor]] = {}
            for path, alias in founds.items():
                is_own = identity(alias) not in made and storage_of(alias) not in routed
                is_like = self._like.get(path) == (alias.shape, alias.dtype)
                if is_own and is_like and _num_bytes(alias) <= self._most:
                    made[identity(alias)] = path, alias.clone()
            return dict(made.values())


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _differing(one: Bits, other: Bits) -> set[str]:
    both = one.keys() & other.keys()
    return (one.keys() ^ other.keys()) | {p for p in both if not same_bits(one[p], other[p])}


def _drawn(like: Tensor, seed: int, device: torch.device) -> Tensor:
    """Some values that occur: floats of 0.5 to 1.5, bytes that are such powers of two as scales."""
    generator = torch.Generator(device).manual_seed(seed)
    if like.is_floating_point():
        values = torch.rand(like.shape, generator=generator, device=device) + 0.5
    else:
        low, high = (96, 160) if like.element_size() == 1 else (1, 1 << 14)
        values = torch.randint(low, high, like.shape, generator=generator, device=device)
    return values.to(like.dtype)


def _others(tensor: Tensor) -> Iterator[Tensor]:
    """Other values of a tensor: drawn again, those of probes, larger, smaller."""
    yield _drawn(tensor, 2, tensor.device)
    yield from (probed(tensor, number, tensor.device) for number in range(PROBES))
    if tensor.is_floating_point():
        wide = tensor.float()
        yield (wide * _FACTOR).to(tensor.dtype)
        yield (wide / _FACTOR).to(tensor.dtype)
    else:
        bits = as_bits(tensor)
        yield (bits + 32).view(tensor.dtype)
        yield (bits >> 1).view(tensor.dtype)
