"""What an engine computed of small tensors after loading, computed again by its own code.

Scales that the engine has merged, inverted or rounded are not to be found in it any more. They are
kept beside it as its loader fills them, and written there by routes like all weights. After a write
the engine's work runs in the second instance of each module that is touched, on these alone, and
what it makes of them is copied to where the engine has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.backend import backend_for
from deltasync.delta.bits import Flat, as_bits
from deltasync.delta.digests import DigestLedger
from deltasync.delta.patch import chunk_numel_on
from deltasync.delta.route import Piece
from deltasync.delta.shard import whole
from deltasync.engines.proof.again import Again
from deltasync.engines.proof.cold import FAILURES
from deltasync.engines.proof.proving import Proof, same_bits, scope_of
from deltasync.engines.proof.reach import Found, named
from deltasync.engines.proof.units import Unit, small_of, units_of
from deltasync.engines.routes.recorder import Recording
from deltasync.errors import ConfigError, DeltaSyncError, EngineFailed, TargetMoved
from deltasync.wire.messages import ParameterSpec

Read = Callable[[str], Tensor]
"""Returns the live value of a checkpoint tensor."""

_AS_LOADED = " (as loaded)"  # after the name of a tensor that is kept beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt(Recording):
    """Routes that were learnt.

    Attributes:
        recomputed: What has to be computed again after writes.
    """

    recomputed: Recomputed


class Recomputed:
    """What an engine computes of small tensors.

    Args:
        proof: The proof of the engine. Its second instance is kept.
        units: The modules that compute.
        beside: By name, tensors as the loader fills them, of which the engine has no copy.
        sources: By name of a loaded tensor, the checkpoint tensors that fill it, and how.

    Attributes:
        beside: The same. Written through routes.

    Raises:
        ConfigError: The engine lacks something that a unit makes.
    """

    def __init__(
        self,
        proof: Proof,
        units: Sequence[Unit],
        beside: Mapping[str, Tensor],
        sources: Mapping[str, Sequence[tuple[str, Piece]]],
    ) -> None:
        self.beside = dict(beside)
        self._proof, self._units, self._sources = proof, tuple(units), sources
        self._names = {
            unit: {source for name in unit.given for source, _ in sources[name]} for unit in units
        }
        self._live: dict[Unit, dict[str, Found]] = {}
        for unit in units:
            reached = proof.scopes.reach((scope_of(unit.module),)).tensors
            if missing := set(unit.made) - reached.keys():
                raise ConfigError(
                    f"{min(missing)!r} is not there, though other layers like this one have it"
                )
            self._live[unit] = {path: reached[path] for path in unit.made}
        self._again = {unit: Again(proof, unit.module, unit.made) for unit in units}
        # What was loaded, as units are given it: kept beside, or read back into this.
        read_back = {n for unit in units for n in unit.given if as_loaded(n) not in beside}
        self._rooms = {
            name: empty_as(tensor, proof.cold.device)
            for name, tensor in _named_in(proof.cold.model, read_back).items()
        }
        loaded = {as_loaded(name): one for name, one in self._rooms.items()} | self.beside
        made = {path: one.alias for live in self._live.values() for path, one in live.items()}
        self._digests = _Digests(loaded | made)
        # Of what each unit's results were computed, and what they were then: digests.
        self._state: dict[Unit, tuple[int, int]] = {}

    def run(self, read: Read, changed: Collection[str] | None = None) -> bool:
        """Compute again what follows from tensors that were written, and copy it to the engine.

        Nothing is copied before all is computed. Returns whether there was anything to compute:
        then the engine's code has run, which may share state with the live engine.

        Args:
            read: Returns the live value of a checkpoint tensor.
            changed: Names of the tensors that were written; None for all.

        Raises:
            EngineFailed: The engine's code raised, or made something else than before.
            TargetMoved: The engine has replaced what was computed.
        """
        touched = [
            unit
            for unit, names in self._names.items()
            if unit not in self._state or changed is None or not names.isdisjoint(changed)
        ]
        given = {unit: self._given(unit, read) for unit in touched}
        digests = dict(zip(touched, self._digests.of(map(_given, touched)), strict=True))
        made = {
            unit: self._made(unit, given[unit])
            for unit, digest in digests.items()
            if unit not in self._state or self._state[unit][0] != digest
        }
        for unit in made:
            self._state.pop(unit, None)
        _copy_all(
            (found.alias, results[path])
            for unit, results in made.items()
            for path, found in self._live[unit].items()
        )
        for unit, digest in zip(made, self._digests.of(unit.made for unit in made), strict=True):
            self._state[unit] = digests[unit], digest
        return bool(made)

    def verify(self, read: Read) -> None:
        """Raise ConfigError, by name, if the engine holds something else than `run` computes."""
        for unit in self._units:
            given = self._given(unit, read)
            try:
                results = self._made(unit, given)
            except EngineFailed as error:
                raise ConfigError(str(error)) from error
            for path, found in self._live[unit].items():
                if not same_bits(found.alias, results[path]):
                    raise ConfigError(
                        f"{path!r} is not what the engine's work after loading makes again of "
                        f"{unit.given[0]!r}: restart the engine, and connect first with all "
                        "tensors that are to be sent"
                    )
        of_given = self._digests.of(map(_given, self._units))
        of_made = self._digests.of(unit.made for unit in self._units)
        self._state |= dict(zip(self._units, zip(of_given, of_made, strict=True), strict=True))

    def look(self) -> None:
        """Note what the engine has lost or changed since, as in its sleep: `run` makes it anew.

        Raises ConfigError, by name, if it has replaced what was computed.
        """
        for live in self._live.values():
            for path, found in live.items():
                if found.is_moved:
                    raise ConfigError(
                        f"the engine has replaced {path!r}, which it computes of its weights, "
                        "since routes to them were learnt: restart it"
                    )
        known = list(self._state)
        for unit, digest in zip(known, self._digests.of(u.made for u in known), strict=True):
            if self._state[unit][1] != digest:
                del self._state[unit]

    def forget(self) -> None:
        """Have the next `run` compute all of what it is asked for."""
        self._state.clear()

    def keep(self, scopes: Collection[str]) -> KeptBeside:
        """A copy of what is kept beside some layers."""
        here = {n: one for n, one in self.beside.items() if scope_of(n) in scopes}
        return KeptBeside(here, self._state)

    def _given(self, unit: Unit, read: Read) -> dict[str, Tensor]:
        """What the unit's module was loaded with, by name."""
        for name in self._rooms.keys() & set(unit.given):
            for source, piece in self._sources[name]:
                bits = piece.source.view(as_bits(read(source)))
                piece.target.view(as_bits(self._rooms[name])).copy_(bits)
        beside = self.beside
        return {n: self._rooms[n] if n in self._rooms else beside[as_loaded(n)] for n in unit.given}

    def _made(self, unit: Unit, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                results = self._again[unit].made(given)
        except DeltaSyncError:
            raise
        except Exception as error:
            raise EngineFailed(
                f"the engine's work after loading on {unit.module!r} raised {error!r}",
                error=type(error).__name__,
            ) from error
        for path, found in self._live[unit].items():
            now, live = results.get(path), found.alias
            if found.is_moved:
                raise TargetMoved(f"storage of {path!r} was replaced; rejoin")
            if now is None or (now.shape, now.dtype) != (live.shape, live.dtype):
                raise EngineFailed(f"the engine's work after loading makes no {path!r} any more")
        return results


class KeptBeside:
    """A copy of what is kept beside an engine, to restore it.

    Args:
        tensors: What is copied.
        state: What is restored with it.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], state: MutableMapping[Unit, tuple[int, int]]
    ) -> None:
        self._copies = [(one, one.clone()) for one in tensors.values()]
        self._state, self._before = state, dict(state)

    def put_back(self) -> None:
        """Restore it. The engine's own tensors must be restored too."""
        self.put_back_tensors()
        self._state.clear()
        self._state.update(self._before)

    def put_back_tensors(self) -> None:
        """Restore what is kept beside alone."""
        for one, before in self._copies:
            as_bits(one).copy_(as_bits(before))


def with_recomputed(
    proof: Proof, recording: Recording, moved: Recording, beside: MutableMapping[str, Tensor]
) -> Learnt:
    """Routes for small tensors of which the engine computes something, to copies beside it.

    Args:
        proof: The proof of the engine.
        recording: What the second instance's loader does.
        moved: The same after the engine's work, where that only moves elements.
        beside: What was kept beside this engine before, which is used on; what is new is added.

    Returns:
        The routes. If what `moved` refuses is not of small tensors alone, it is refused still.

    Raises ConfigError if it cannot be found out what else is computed.
    """
    layers = _Layers(proof, recording, moved)
    found = layers.routes()
    units: Sequence[Unit] = ()
    if not found.refused:
        try:
            units = layers.units(found)
        except ConfigError as error:
            if not moved.refused:  # nothing would say so
                raise
            found = replace(moved, refused=dict.fromkeys(moved.refused, str(error)))
    for name in () if found.refused else layers.computed:
        loaded, own = layers.loaded[name], as_loaded(name)
        if own not in beside or beside[own].shape != loaded.shape:
            beside[own] = empty_as(loaded, proof.cold.device)
    kept = {own: beside[own] for own in map(as_loaded, layers.computed) if own in beside}
    fields = {name: getattr(found, name) for name in Recording.__dataclass_fields__}
    return Learnt(**fields, recomputed=Recomputed(proof, units, kept, layers.sources))


class _Layers:
    """What is loaded into layers, and what they compute of it.

    Attributes:
        loaded: What the loader fills, by name.
        sources: By the same names, the checkpoint tensors that do, and how.
        computed: Names of those that are small, and to all of which no route leads.
    """

    def __init__(self, proof: Proof, recording: Recording, moved: Recording) -> None:
        self._proof, self._recording, self._moved = proof, recording, moved
        self.sources: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for name, pieces in recording.pieces.items():
            for piece in pieces:
                self.sources[piece.live].append((name, piece))
        self.loaded = _named_in(proof.cold.model, self.sources.keys())
        self._by_scope: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in self.loaded.items():
            self._by_scope[scope_of(name)][name] = tensor
        small = set[str]().union(*map(small_of, self._by_scope.values()))
        lost = {name for one in moved.refused for name in self.loaded_by(one)}
        self.computed = lost & small

    def loaded_by(self, name: str) -> set[str]:
        """What a checkpoint tensor is loaded into."""
        return {piece.live for piece in self._recording.pieces[name]}

    def routes(self) -> Recording:
        """The routes, with those to what is kept beside; as they were if others are refused."""
        pieces = dict(self._moved.pieces)
        for name, loaded in self._recording.pieces.items():
            lives = self.loaded_by(name)
            if not lives.isdisjoint(self.computed):
                if not lives <= self.computed:
                    return self._moved
                pieces[name] = tuple(replace(one, live=as_loaded(one.live)) for one in loaded)
        if any(not self.loaded_by(name) <= self.computed for name in self._moved.refused):
            return self._moved
        return replace(self._moved, pieces=pieces, refused={})

    def units(self, found: Recording) -> list[Unit]:
        """What all layers compute; those that look alike are searched once.

        Raises ConfigError for what cannot be computed again.
        """
        routed = defaultdict[str, set[str]](set)
        for pieces in found.pieces.values():
            for piece in pieces:
                routed[scope_of(piece.live)].add(piece.live)
        kinds: dict[object, tuple[Unit, ...]] = {}
        units: list[Unit] = []
        for scope, loaded in self._by_scope.items():
            kind = self._kind(scope, loaded, routed[scope])
            if kind not in kinds:
                own = self._units(scope, loaded, routed[scope])
                kinds[kind] = tuple(unit.renamed(scope, "") for unit in own)
            units += [unit.renamed("", scope) for unit in kinds[kind]]
        return units

    def _units(
        self, scope: str, loaded: Mapping[str, Tensor], routed: Collection[str]
    ) -> tuple[Unit, ...]:
        computed = self.computed & loaded.keys()
        try:
            return units_of(self._proof, scope, loaded, computed=computed, moved=routed)
        except FAILURES as error:
            if isinstance(error, ConfigError):
                raise
            if not computed:
                return ()
            raise ConfigError(
                "is computed by the engine's work after loading, which cannot be watched: it "
                f"raised {error!r}"
            ) from error

    def _kind(
        self, scope: str, loaded: Mapping[str, Tensor], routed: Collection[str]
    ) -> tuple[object, ...]:
        names = sorted(
            name.removeprefix(scope) for name in (*routed, *self.computed & loaded.keys())
        )
        shapes = [(n.removeprefix(scope), t.shape, t.stride(), t.dtype) for n, t in loaded.items()]
        return (*names, *shapes, self._proof.kind_of(scope))


def as_loaded(name: str) -> str:
    """What a tensor that is kept beside the engine is called."""
    return name + _AS_LOADED


def empty_as(like: Tensor, device: torch.device) -> Tensor:
    """Zeros that lie in their storage as a tensor without memory does in its own."""
    count = like.untyped_storage().nbytes() // like.element_size()
    line = torch.zeros(count, dtype=like.dtype, device=device)
    return line.as_strided(like.shape, like.stride(), like.storage_offset())


def _named_in(model: torch.nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named(model).items() if name in names}


def _given(unit: Unit) -> list[str]:
    return [as_loaded(name) for name in unit.given]


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Overwrite the bits of tensors with those of others, in few calls."""
    by_type = defaultdict[torch.dtype, list[tuple[Tensor, Tensor]]](list)
    for one, other in pairs:
        bits = as_bits(one)
        by_type[bits.dtype].append((bits, as_bits(other)))
    for alike in by_type.values():
        here, there = zip(*alike, strict=True)
        torch._foreach_copy_(here, there)


class _Digests:
    """Digests of tensors that stay where they are, read from memory.

    Args:
        tensors: These, by name. Not owned.

    Raises:
        ConfigError: The elements of one have no plain storage of their own.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        flats = [Flat.of(one, name=name) for name, one in tensors.items()]
        specs = [
            ParameterSpec((name,), tuple(one.shape), flat.dtype)
            for (name, one), flat in zip(tensors.items(), flats, strict=True)
        ]
        step = chunk_numel_on(*{one.device.type for one in tensors.values()})
        ledger = DigestLedger(whole(specs), chunk_numel=step)
        self._backend = backend_for(dict(enumerate(flats)), ledger, kernels="auto")
        self._chunks = {
            name: np.arange(*ledger.first[number : number + 2])
            for number, name in enumerate(tensors)
        }

    def of(self, groups: Iterable[Sequence[str]]) -> list[int]:
        """The digest of each group of tensors. All are read together."""
        chunks = [np.concatenate([self._chunks[name] for name in names]) for names in groups]
        if not chunks:
            return []
        found = np.zeros(len(chunks), np.uint64)
        group = np.repeat(np.arange(len(chunks)), [len(one) for one in chunks])
        np.add.at(found, group, self._backend.measure(np.concatenate(chunks)))
        return found.tolist()
