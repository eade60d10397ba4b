"""Routes to parameters that an engine replaces after loading, learnt in its second instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from deltasync.delta.bits import identity
from deltasync.delta.codes import CODE_BITS
from deltasync.delta.memory import raise_lack_of_memory
from deltasync.delta.region import Region
from deltasync.delta.route import Piece
from deltasync.engines.proof.cold import FAILURES, with_room
from deltasync.engines.proof.fixed import fixed_in, with_fixed
from deltasync.engines.proof.proved import recorded
from deltasync.engines.proof.proving import Proof, scope_of
from deltasync.engines.proof.reach import named
from deltasync.engines.proof.recomputed import Learnt, with_recomputed
from deltasync.engines.routes.learning import Moves, Process, pieces_of
from deltasync.engines.routes.recorder import CheckpointTensor, Recording
from deltasync.errors import ConfigError

Pieces = tuple[Piece, ...]
_BYTE = 8  # bits
_TWICE = "is kept twice by the engine, once as it was and once rearranged"
_COMPUTED = "is computed by the engine's work after loading, not moved"


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
    if fixed := fixed_in(recording, checkpoint):
        recording = recorded(proof, [one for one in checkpoint if one not in fixed])
    if why := {**recording.refused, **recording.uncovered}:
        raise ConfigError(f"{min(why)!r} {why[min(why)]}")
    moved = _Learning(proof, recording).recording()
    learnt = with_recomputed(proof, recording, moved, {} if beside is None else beside)
    return with_fixed(learnt, fixed)


class _Learning:
    """The learning of one engine's routes."""

    def __init__(self, proof: Proof, recording: Recording) -> None:
        self._proof, self._recording = proof, recording
        live = named(proof.model)
        first = {identity(tensor): name for name, tensor in reversed(list(live.items()))}
        self._live = {n: t for n, t in live.items() if first[identity(t)] == n and t.numel()}
        self._loaded = named(proof.cold.model)
        self._layers: dict[str, _Layer] = {}
        self._kinds: dict[object, _Layer] = {}
        self._inputs: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for pieces in recording.pieces.values():
            for piece in pieces:
                self._inputs[scope_of(piece.live)][piece.live] = self._loaded[piece.live]

    def recording(self) -> Recording:
        pieces: dict[str, Pieces] = {}
        refused: dict[str, str] = {}
        for name, loaded in self._recording.pieces.items():
            try:
                pieces[name] = tuple(p for piece in loaded for p in self._moved(piece))
            except ConfigError as error:
                refused[name] = str(error)
        found = replace(self._recording, pieces=pieces, refused=refused)
        return replace(found, together=(), untouched=(), padding={})

    def _moved(self, piece: Piece) -> Pieces:
        """Where the elements of a piece are after the work. Raises ConfigError."""
        scope = scope_of(piece.live)
        if scope not in self._layers:
            self._layers[scope] = self._layer(scope)
        own = piece.live.removeprefix(scope)
        moved = self._layers[scope].moved(own, piece.source, piece.target)
        return tuple(replace(one, live=scope + one.live) for one in moved)

    def _layer(self, scope: str) -> _Layer:
        """What was learnt of a layer, or of one that looks like it: both are proved later."""
        inputs = {n.removeprefix(scope): t for n, t in self._inputs[scope].items()}
        live = {n.removeprefix(scope): t for n, t in self._live.items() if scope_of(n) == scope}
        shapes = [
            (name, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
            for tensors in (inputs, live)
            for name, tensor in tensors.items()
        ]
        kind = (*shapes, self._proof.kind_of(scope))
        if kind not in self._kinds:
            self._kinds[kind] = self._learnt(scope, inputs, live)
        return self._kinds[kind]

    def _learnt(
        self, scope: str, inputs: Mapping[str, Tensor], live: Mapping[str, Tensor]
    ) -> _Layer:
        def process(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with self._proof.processing(scope, {scope + n: t for n, t in given.items()}) as after:
                made = {path: found.alias.clone() for path, found in after.tensors.items()}
            found = {name: made[scope + name] for name in live if scope + name in made}
            return {n: t for n, t in found.items() if _is_like(t, live[n])}

        return _Layer(process, inputs, live, self._proof.cold.device)


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

    def moved(self, name: str, source: Region, target: Region) -> Pieces:
        """Where elements of an input are, of which it is known where they come from.

        Raises ConfigError.
        """
        if self._still.get(name):
            raise ConfigError(_TWICE)
        if name in self._still:
            return (Piece(live=name, source=source, target=target),)
        key = name, source, target
        if key not in self._known:
            self._known[key] = self._found(name, source, target)
        found = self._known[key]
        if isinstance(found, str):
            raise ConfigError(found)
        return found

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
