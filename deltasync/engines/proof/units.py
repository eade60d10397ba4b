"""What an engine's work after loading computes of small tensors alone, found by running it.

Scales of quantized layers are inverted, merged, rounded and multiplied after loading. Their values
are not found by moving elements; but the engine's own code makes them again from the small tensors
that a layer loads, whatever the large ones hold. Which results depend on which tensors is found in
a second instance of the layer, by changing one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.bits import as_bits, identity, storage_of
from deltasync.engines.proof.cold import FAILURES, with_room
from deltasync.engines.proof.proving import Bits, Proof
from deltasync.engines.proof.reach import same_bits
from deltasync.engines.routes.learning import PROBES, probed
from deltasync.engines.running import raise_lack_of_memory
from deltasync.errors import ConfigError

_SMALL = 4  # a tensor is small if it has one of so many bytes of its module, or less
_FACTOR = 64  # by which values become larger and smaller; FP8 holds it


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer of which the engine's work computes something from small tensors alone.

    Attributes:
        scope: Its name.
        given: Names of these tensors, as they were loaded.
        made: Paths of what is computed.
    """

    scope: str
    given: tuple[str, ...]
    made: tuple[str, ...]

    def of(self, scope: str) -> Unit:
        """The same of another layer of this kind."""
        given, made = (
            tuple(scope + name.removeprefix(self.scope) for name in names)
            for names in (self.given, self.made)
        )
        return Unit(scope, given, made)


def small_of(loaded: Mapping[str, Tensor]) -> set[str]:
    """The names of tensors that are small beside others of their module.

    Args:
        loaded: What is loaded into a layer, by name.
    """
    total = defaultdict[str, int](int)
    for name, tensor in loaded.items():
        total[_owner(name)] += tensor.nbytes
    return {n for n, t in loaded.items() if t.nbytes * _SMALL <= total[_owner(n)]}


def unit_of(
    proof: Proof,
    scope: str,
    loaded: Mapping[str, Tensor],
    *,
    computed: Collection[str],
    routed: Collection[str],
) -> Unit | None:
    """What a layer computes of small tensors; None if that is nothing.

    Args:
        proof: The proof of the engine.
        scope: The layer.
        loaded: What is loaded into it, by name; shapes and dtypes alone are read.
        computed: Names of the small ones to which no route leads.
        routed: Names of the live tensors to which routes lead.

    Raises:
        ConfigError: What becomes of `computed` depends on more than small tensors of the layer, or
            the work cannot be run.
    """
    try:
        return with_room(
            proof.cold.device,
            lambda device: _Search(proof, scope, loaded, routed, device).unit(computed),
        )
    except FAILURES as error:
        if isinstance(error, ConfigError):
            raise
        if not computed:
            return None
        raise ConfigError(
            "is computed by the engine's work after loading, which cannot be watched: it raised "
            f"{error!r}"
        ) from error


class _Search:
    """The search in one layer."""

    def __init__(
        self,
        proof: Proof,
        scope: str,
        loaded: Mapping[str, Tensor],
        routed: Collection[str],
        device: torch.device,
    ) -> None:
        self._proof, self._scope, self._loaded, self._routed = proof, scope, loaded, routed
        self._device = device  # of the values that are tried
        self._small = small_of(loaded)
        live = proof.scopes.reach((scope,)).tensors
        self._like = {path: (f.alias.shape, f.alias.dtype) for path, f in live.items()}
        small_bytes = sum(loaded[name].nbytes for name in self._small)
        self._most = max(_FACTOR << 10, _SMALL * small_bytes)  # of a result that is looked at

    def unit(self, computed: Collection[str]) -> Unit | None:
        first = {n: _drawn(one, 0, self._device) for n, one in self._loaded.items()}
        base = self._made(first)
        runs = [(first, base)]
        second = {n: _drawn(one, 1, self._device) for n, one in self._loaded.items()}
        runs.append((self._small_in(second), self._made(second)))
        for number in range(PROBES):
            given = {n: probed(one, number, self._device) for n, one in self._loaded.items()}
            if (made := self._tried(given)) is not None:
                runs.append((self._small_in(given), made))
        if not computed and not any(_differing(base, made) for _, made in runs[1:]):
            return None
        made_of = {name: self._made_of(name, first, base) for name in sorted(self._small)}
        every = set[str]().union(*made_of.values())
        names, paths = [name for name, made in made_of.items() if made], set(every)
        for given, whole in runs if paths else ():
            alone = self._tried({n: given[n] for n in names}, paths) or {}
            paths &= {p for p in alone.keys() & whole.keys() if same_bits(alone[p], whole[p])}
        for name in sorted(computed):
            if wrong := made_of[name] & every - paths:
                raise ConfigError(
                    f"is computed by the engine's work after loading, and {min(wrong)!r} depends "
                    f"on more than {name!r} and other small tensors of its layer"
                )
        return Unit(self._scope, tuple(names), tuple(sorted(paths))) if paths else None

    def _small_in(self, given: Bits) -> dict[str, Tensor]:
        return {name: given[name] for name in self._small}

    def _made_of(self, name: str, first: Bits, base: Bits) -> set[str]:
        """Paths of what changes with a tensor alone."""
        tried = (self._tried({**first, name: one}) for one in _others(first[name]))
        return set().union(*(_differing(base, now) for now in tried if now is not None))

    def _tried(self, given: Bits, paths: Collection[str] | None = None) -> dict[str, Tensor] | None:
        """As `_made`; None if the work raises with such values."""
        try:
            return self._made(given, paths)
        except FAILURES as error:
            raise_lack_of_memory(error)
            return None

    def _made(self, given: Bits, paths: Collection[str] | None = None) -> dict[str, Tensor]:
        """What the work on the layer makes: at these paths, or of all that is looked at.

        That is what the live layer has too, once, without what is large or lies where routes lead.
        """
        with self._proof.processing(self._scope, given) as after:
            founds = {path: found.alias for path, found in after.tensors.items()}
            if paths is not None:
                return {path: founds[path].clone() for path in paths if path in founds}
            routed = {storage_of(founds[name]) for name in self._routed if name in founds}
            made: dict[tuple[object, ...], tuple[str, Tensor]] = {}
            for path, alias in founds.items():
                is_own = identity(alias) not in made and storage_of(alias) not in routed
                is_like = self._like.get(path) == (alias.shape, alias.dtype)
                if is_own and is_like and alias.nbytes <= self._most:
                    made[identity(alias)] = path, alias.clone()
            return dict(made.values())


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


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
