"""Routes to parameters that an engine replaces after loading, learnt in its second instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from deltasync.delta.bits import dtype_of, identity
from deltasync.delta.region import Region
from deltasync.engines.proof.cold import FAILURES, with_room
from deltasync.engines.proof.proved import recorded
from deltasync.engines.proof.proving import Proof, scope_of
from deltasync.engines.proof.reach import named
from deltasync.engines.proof.recomputed import Learnt, Recomputed, as_fixed, as_loaded, empty_as
from deltasync.engines.proof.units import Unit, small_of, unit_of
from deltasync.engines.routes.codes import CODE_BITS
from deltasync.engines.routes.learning import Moves, Process, pieces_of
from deltasync.engines.routes.recorder import CheckpointTensor, Recording, without_data
from deltasync.engines.routes.route import Piece
from deltasync.engines.running import raise_lack_of_memory
from deltasync.errors import ConfigError

T = TypeVar("T")
Pieces = tuple[Piece, ...]
_BYTE = 8  # bits
_TWICE = "is kept twice by the engine, once as it was and once rearranged"
_COMPUTED = "is computed by the engine's work after loading, not moved"
_MOST_FIXED = 8  # elements of a fixed tensor


def learn_routes(
    proof: Proof,
    checkpoint: Sequence[CheckpointTensor],
    beside: MutableMapping[str, Tensor] | None = None,
) -> Learnt:
    """Record the loader of the second instance, and learn where its work after loading moves that.

    Small tensors of which that work computes something have routes to copies beside the engine.

    The engine itself is not touched. Nothing of the result is proved.

    Args:
        proof: The proof of the engine.
        checkpoint: What its loader is given, in order.
        beside: What was kept beside the engine for other tensors, by name. It is used on, and what
            is new is added.

    Returns:
        Routes into the live engine's parameters and buffers, and beside it. Large tensors of which
        the engine computes something else are refused. Small ones that the loader puts on top of
        each other are fixed.

    Raises:
        ConfigError: The loader itself does more than to copy, or cannot be watched.
    """
    recording = recorded(proof, checkpoint)
    if fixed := _fixed_in(recording, checkpoint):
        recording = recorded(proof, [one for one in checkpoint if one not in fixed])
    if why := {**recording.refused, **recording.uncovered}:
        raise ConfigError(f"{min(why)!r} {why[min(why)]}")
    return _Learning(proof, recording).learnt(fixed, {} if beside is None else beside)


def _fixed_in(
    recording: Recording, checkpoint: Sequence[CheckpointTensor]
) -> list[CheckpointTensor]:
    """Small tensors of integers that all go to places that have no route, or become floats.

    What an engine makes of these alone does not change if they do not.
    """
    return [
        one
        for one in checkpoint
        if 0 < one.numel <= _MOST_FIXED and not one.dtype.is_floating_point
        if (pieces := recording.pieces.get(one.name))
        if recording.dtypes[one.name].is_floating
        or all(piece.live in recording.uncovered for piece in pieces)
    ]


class _Learning:
    """The learning of one engine's routes. Layers that look alike are learnt once.

    Args:
        proof: The proof of the engine.
        recording: What the second instance's loader does.
    """

    def __init__(self, proof: Proof, recording: Recording) -> None:
        self._proof, self._recording = proof, recording
        # By name of a loaded tensor: the checkpoint tensors that fill it, and how.
        self._sources: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for name, pieces in recording.pieces.items():
            for piece in pieces:
                self._sources[piece.live].append((name, piece))
        live = named(proof.model)
        first = {identity(tensor): name for name, tensor in reversed(list(live.items()))}
        live = {n: t for n, t in live.items() if first[identity(t)] == n and t.numel()}
        loaded = named(proof.cold.model)
        self._loaded = _by_scope({name: loaded[name] for name in self._sources})
        self._live = _by_scope(live)
        self._kinds = {scope: self._kind(scope) for scope in self._loaded}
        self._layers: dict[object, _Layer | str] = {}  # by kind; or why nothing is learnt

    def learnt(
        self, fixed: Sequence[CheckpointTensor], beside: MutableMapping[str, Tensor]
    ) -> Learnt:
        """The routes, those of fixed and of small tensors to what is kept beside the engine."""
        recording, pieces, refused = self._recording, dict[str, Pieces](), dict[str, str]()
        for name, loaded in recording.pieces.items():
            moved = self._moved(loaded)
            if isinstance(moved, str):
                refused[name] = moved
            else:
                pieces[name] = moved
        small = set[str]().union(*map(small_of, self._loaded.values()))
        computed = {live for name in refused for live in self._lives(name)} & small
        kept = {n for n in recording.pieces if not computed.isdisjoint(self._lives(n))}
        units: list[Unit] = []
        if all(self._lives(name) <= computed for name in refused.keys() | kept):
            routed = {piece.live for n in pieces.keys() - kept for piece in pieces[n]}
            try:
                units = self._units(_by_scope(dict.fromkeys(routed)), computed)
            except ConfigError as error:
                if not refused:  # nothing would say so
                    raise
                refused = dict.fromkeys(refused, str(error))
            else:
                refused = {}
                for name in kept:
                    loaded = recording.pieces[name]
                    pieces[name] = tuple(replace(p, live=as_loaded(p.live)) for p in loaded)
        likes = {} if refused else {as_loaded(n): self._loaded[scope_of(n)][n] for n in computed}
        likes |= {as_fixed(one.name): without_data(one) for one in fixed}
        for name, like in likes.items():
            if name not in beside or not _is_like(beside[name], like):
                beside[name] = empty_as(like, self._proof.cold.device)
        for one in fixed:
            every = Region.run(0, one.numel)
            pieces[one.name] = (Piece(as_fixed(one.name), every, every),)
        return Learnt(
            pieces=pieces,
            given=recording.given | {one.name: one.names for one in fixed},
            dtypes=recording.dtypes | {o.name: dtype_of(likes[as_fixed(o.name)]) for o in fixed},
            refused=refused,
            uncovered={},
            written=recording.written,
            fixed=frozenset(one.name for one in fixed),
            recomputed=Recomputed(
                self._proof,
                units,
                {name: beside[name] for name in likes},
                [one.name for one in fixed],
                self._sources,
            ),
        )

    def _lives(self, name: str) -> set[str]:
        """What a checkpoint tensor is loaded into."""
        return {piece.live for piece in self._recording.pieces[name]}

    def _moved(self, loaded: Pieces) -> Pieces | str:
        """Where the elements of some pieces are after the work, or why there is no route."""
        found: list[Piece] = []
        for piece in loaded:
            scope = scope_of(piece.live)
            kind = self._kinds[scope]
            try:
                if kind not in self._layers:
                    self._layers[kind] = self._layer(scope)
                layer = self._layers[kind]
                own = piece.live.removeprefix(scope)
                moved = layer if isinstance(layer, str) else layer.moved(own, piece)
            except ConfigError as error:
                moved = str(error)
                self._layers.setdefault(kind, moved)
            if isinstance(moved, str):
                return moved
            found += [replace(one, live=scope + one.live) for one in moved]
        return tuple(found)

    def _kind(self, scope: str) -> object:
        """What is equal for layers that look alike: all of them are proved later."""
        shapes = [
            (name.removeprefix(scope), one.shape, one.stride(), one.storage_offset(), one.dtype)
            for tensors in (self._loaded[scope], self._live.get(scope, {}))
            for name, one in tensors.items()
        ]
        return (*shapes, self._proof.kind_of(scope))

    def _layer(self, scope: str) -> _Layer:
        inputs, live = (
            {name.removeprefix(scope): one for name, one in tensors.items()}
            for tensors in (self._loaded[scope], self._live.get(scope, {}))
        )

        def process(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with self._proof.processing(scope, {scope + n: t for n, t in given.items()}) as after:
                made = {path: found.alias.clone() for path, found in after.tensors.items()}
            found = {name: made[scope + name] for name in live if scope + name in made}
            return {n: t for n, t in found.items() if _is_like(t, live[n])}

        return _Layer(process, inputs, live, self._proof.cold.device)

    def _units(self, routed: Mapping[str, Mapping[str, None]], computed: set[str]) -> list[Unit]:
        """What all layers compute. Raises ConfigError for what cannot be computed again.

        Args:
            routed: By layer, names of the live tensors to which routes lead.
            computed: Names of the small tensors to which none leads, as they are loaded.
        """
        kinds: dict[object, Unit | None] = {}
        units: list[Unit] = []
        for scope, loaded in self._loaded.items():
            here, lost = set(routed.get(scope, ())), computed & loaded.keys()
            own = (frozenset(n.removeprefix(scope) for n in names) for names in (here, lost))
            kind = (self._kinds[scope], *own)
            if kind not in kinds:
                kinds[kind] = unit_of(self._proof, scope, loaded, computed=lost, routed=here)
            if (unit := kinds[kind]) is not None:
                units.append(unit.of(scope))
        return units


def _by_scope(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """By layer, and then by name."""
    found: dict[str, dict[str, T]] = defaultdict(dict)
    for name, one in tensors.items():
        found[scope_of(name)][name] = one
    return found


class _Layer:
    """What was learnt of a layer; names are without the layer's."""

    def __init__(
        self,
        process: Process,
        inputs: Mapping[str, Tensor],
        live: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._process, self._inputs, self._live, self._device = process, inputs, live, device
        self._still: dict[str, bool] = {}  # what stays as it is loaded: whether it is kept twice
        self._tables = self._learnt(_BYTE)
        self._known: dict[tuple[str, Region, Region], Pieces | str] = {}

    @cached_property
    def _codes(self) -> dict[str, _Table]:
        """Where codes of 4 bits are, which count as elements do."""
        return self._learnt(CODE_BITS)

    def _learnt(self, bits: int) -> dict[str, _Table]:
        return with_room(self._device, partial(self._learnt_on, bits))

    def _learnt_on(self, bits: int, device: torch.device) -> dict[str, _Table]:
        moves = self._moves(bits, device)
        if bits == _BYTE:
            self._still = {name: bool(moves.places(name, self._live)) for name in moves.still}
        return {
            name: _Table(
                moves.places(name, self._live), loaded.numel() * _fields(loaded, bits), device
            )
            for name, loaded in self._inputs.items()
            if name not in moves.still
            if bits == _BYTE or not loaded.is_floating_point()  # floats are no codes
        }

    def _moves(self, bits: int, device: torch.device) -> Moves:
        still = [name for name in self._inputs if self._is_in_place(name)] if bits == _BYTE else []
        why = ""
        for is_gentle in (False, True):
            try:
                return Moves(
                    self._process,
                    self._inputs,
                    bits,
                    is_gentle=is_gentle,
                    device=device,
                    still=still,
                )
            except FAILURES as error:
                raise_lack_of_memory(error)
                why = repr(error)
        raise ConfigError(f"the engine's work after loading cannot be watched: it raised {why}")

    def _is_in_place(self, name: str) -> bool:
        """Whether a live tensor lies as this one is loaded."""
        loaded, live = self._inputs[name], self._live.get(name)
        return live is not None and _is_like(loaded, live) and Region.of(loaded) == Region.of(live)

    def moved(self, name: str, piece: Piece) -> Pieces | str:
        """Where a piece of an input is, or why there is no route. Also raises ConfigError."""
        if name in self._still:
            return _TWICE if self._still[name] else (replace(piece, live=name),)
        key = name, piece.source, piece.target
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _found(self, name: str, source: Region, target: Region) -> Pieces | str:
        loaded, device = self._inputs[name], self._tables[name].device
        numbers = torch.arange(source.numel, device=device)
        elements = target.places(numbers)
        if Region.of(loaded) != Region.run(0, loaded.numel()):
            order = torch.zeros(Region.of(loaded).stop, dtype=torch.int64, device=device)
            Region.of(loaded).view(order).copy_(
                torch.arange(loaded.numel(), device=device).view(Region.of(loaded).shape)
            )
            elements = order[elements]
        numbers = source.places(numbers)
        found = self._tables[name].pieces(numbers, elements)
        if not isinstance(found, str) or loaded.is_floating_point():
            return found
        # Codes that change places between bytes may make numbers of other bytes.
        pieces: list[Piece] = []
        count = _fields(loaded, CODE_BITS)
        for code in range(count):
            found = self._codes[name].pieces(numbers, elements * count + code)
            if isinstance(found, str):
                return found
            pieces += [replace(piece, code=code) for piece in found]
        return tuple(pieces)


class _Table:
    """Where the elements of an input are.

    Args:
        places: By live tensor, int[n] elements and int64[n] places of them there.
        count: Elements of the input.
        device: Where all of that is, and stays.
    """

    def __init__(
        self, places: Mapping[str, tuple[Tensor, Tensor]], count: int, device: torch.device
    ) -> None:
        self._names, self.device = list(places), device
        # Numbers of live tensors.
        self._which = torch.full((count,), -1, dtype=torch.int16, device=device)
        self._where = torch.zeros(count, dtype=torch.int64, device=device)
        total = 0
        for number, (elements, there) in enumerate(places.values()):
            self._which[elements], self._where[elements] = number, there
            total += len(elements)
        self._is_twice = total > int((self._which >= 0).count_nonzero())

    def pieces(self, numbers: Tensor, elements: Tensor) -> Pieces | str:
        """Where some elements are, or why there is no route.

        Args:
            numbers: int64[n]: which elements of a checkpoint tensor they are, rising.
            elements: int64[n]: which elements of the input they are.
        """
        held = self._which[elements]
        if self._is_twice:
            return _TWICE
        if (held < 0).any():
            return _COMPUTED
        found: list[Piece] = []
        for number, live in enumerate(self._names):
            here = held == number
            if not bool(here.any()):
                continue
            pieces = pieces_of(live, numbers[here], self._where[elements[here]])
            if pieces is None:
                return "is rearranged after loading in too many pieces"
            found += pieces
        return tuple(found)


def _fields(tensor: Tensor, bits: int) -> int:
    """What is moved of an element: all of it, or its codes of so many bits."""
    return 1 if bits == _BYTE else tensor.element_size() * _BYTE // bits


def _is_like(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)
