"""What an engine computed of small tensors after loading, computed again by its own code.

Scales that the engine has merged, inverted or rounded are not to be found in it any more. They are
kept beside it as its loader fills them, and written there by routes like all weights. After a write
the engine's work runs in the second instance of each layer that is touched, on these alone, and
what it makes of them is copied to where the engine has it.

Some small tensors are neither kept nor computed with one by one. Checkpoints of packed codes have
the shape of each matrix as a tensor of two integers: engines load these of matrices that they fuse
into one place, where the last one stays. Such *fixed* tensors are kept beside the engine too. They
have the values that the engine was started on, and a sync that brings others fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.bits import as_bits
from deltasync.engines.proof.proving import Bits, Proof, scope_of
from deltasync.engines.proof.reach import Copies, named, same_bits
from deltasync.engines.proof.units import Unit
from deltasync.engines.proof.work import Work
from deltasync.engines.routes.recorder import Recording
from deltasync.engines.routes.route import Piece
from deltasync.errors import ConfigError, EngineFailed

Read = Callable[[str], Tensor]
"""Returns the live value of a checkpoint tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt(Recording):
    """Routes that were learnt.

    Attributes:
        recomputed: What is kept beside the engine, and has to be computed again after writes.
    """

    recomputed: Recomputed


class Recomputed:
    """What an engine computes of small tensors.

    Args:
        proof: The proof of the engine. Its second instance is kept.
        units: The layers that compute.
        beside: Tensors of which the engine has no copy, by the name that routes lead to: small
            ones as its loader fills them (`as_loaded`), and fixed ones (`as_fixed`).
        fixed: Checkpoint names of the fixed ones.
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
        beside: dict[str, Tensor],
        fixed: Collection[str],
        sources: Mapping[str, Sequence[tuple[str, Piece]]],
    ) -> None:
        self.beside, self._sources = beside, sources
        self._fixed = {name: beside[as_fixed(name)].clone() for name in fixed}
        self._works = [Work(proof, unit) for unit in units]
        # What units are given, and is not kept beside: like these in the second instance.
        given = {name for unit in units for name in unit.given}
        cold = named(proof.cold.model)
        self._read_back = {name: cold[name] for name in given if as_loaded(name) not in beside}
        self._device = proof.cold.device

    def run(self, read: Read, changed: Collection[str] | None = None) -> bool:
        """Compute again what follows from tensors that were written, and copy it to the engine.

        Nothing is copied before all is computed. Returns whether there was anything to compute:
        then the engine's code has run, which may share state with the live engine.

        Args:
            read: Returns the live value of a checkpoint tensor.
            changed: Names of the tensors that were written; None for all.

        Raises:
            ConfigError: A fixed tensor has changed.
            EngineFailed: The engine's code raised, or made something else than before.
            TargetMoved: The engine has replaced what was computed.
        """
        for name in self._fixed if changed is None else self._fixed.keys() & set(changed):
            if not same_bits(self.beside[as_fixed(name)], self._fixed[name]):
                raise ConfigError(
                    f"{name!r} may not change, because the engine does not keep it by itself: "
                    "restart the engine on a checkpoint of the trainer's model"
                )
        due: list[tuple[Work, Bits, Bits]] = []
        for work in self._works:
            names = {name for loaded in work.unit.given for name, _ in self._sources[loaded]}
            if work.last is not None and changed is not None and names.isdisjoint(changed):
                continue
            given = self._given(work.unit, read)
            # After an undo nothing may have changed, and the engine's code may still raise.
            if changed is None and work.last is not None and are_same(given, work.last[0]):
                continue
            due.append((work, given, work.made(given)))
        for work, _, _ in due:
            work.last = None
        _copy_all(
            (found.alias, made[path]) for work, _, made in due for path, found in work.live.items()
        )
        for work, given, made in due:
            work.last = given, made
        return bool(due)

    def verify(self, read: Read) -> None:
        """Raise ConfigError, by name, if the engine holds something else than `run` computes."""
        for work in self._works:
            given = self._given(work.unit, read)
            try:
                made = work.made(given)
            except EngineFailed as error:
                raise ConfigError(str(error)) from error
            for path, found in work.live.items():
                if not same_bits(found.alias, made[path]):
                    raise ConfigError(
                        f"{path!r} is not what the engine's work after loading makes again of "
                        f"{work.unit.given[0]!r}: restart the engine, and connect first with all "
                        "tensors that are to be sent"
                    )
            work.last = given, made

    def look(self) -> None:
        """Note what the engine has lost or changed since, as in its sleep: `run` makes it anew.

        Raises ConfigError, by name, if it has replaced what was computed.
        """
        for work in self._works:
            for path, found in work.live.items():
                if found.is_moved:
                    raise ConfigError(
                        f"the engine has replaced {path!r}, which it computes of its weights, "
                        "since routes to them were learnt: restart it"
                    )
            now = {path: found.alias for path, found in work.live.items()}
            if work.last is not None and not are_same(now, work.last[1]):
                work.last = None

    def fix(self, name: str) -> None:
        """Take the value that is kept of a tensor, if it is a fixed one, for what it has to be."""
        if name in self._fixed:
            self._fixed[name] = self.beside[as_fixed(name)].clone()

    def keep(self, scopes: Collection[str]) -> Copies:
        """A copy of what is kept beside some layers."""
        return Copies(one for n, one in self.beside.items() if scope_of(n) in scopes)

    def _given(self, unit: Unit, read: Read) -> Bits:
        """Copies of what the unit's layer was loaded with, by name."""
        given: dict[str, Tensor] = {}
        for name in unit.given:
            if name not in self._read_back:
                given[name] = self.beside[as_loaded(name)].clone()
                continue
            given[name] = empty_as(self._read_back[name], self._device)
            for source, piece in self._sources[name]:
                bits = piece.source.view(as_bits(read(source)))
                piece.target.view(as_bits(given[name])).copy_(bits)
        return given


def are_same(one: Bits, other: Bits) -> bool:
    """Whether two groups of tensors have the same bits."""
    return all(same_bits(tensor, other[name]) for name, tensor in one.items())


def as_loaded(name: str) -> str:
    """What a loaded tensor that is kept beside the engine is called."""
    return f"{name} (as loaded)"


def as_fixed(name: str) -> str:
    """What a fixed tensor of the checkpoint is called beside the engine."""
    return f"{name} (fixed)"


def empty_as(like: Tensor, device: torch.device) -> Tensor:
    """Zeros that lie in their storage as a tensor without memory does in its own."""
    count = like.untyped_storage().nbytes() // like.element_size()
    line = torch.zeros(count, dtype=like.dtype, device=device)
    return line.as_strided(like.shape, like.stride(), like.storage_offset())


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Overwrite the bits of tensors with those of others, in few calls."""
    by_type = defaultdict[torch.dtype, list[tuple[Tensor, Tensor]]](list)
    for one, other in pairs:
        bits = as_bits(one)
        by_type[bits.dtype].append((bits, as_bits(other)))
    for alike in by_type.values():
        here, there = zip(*alike, strict=True)
        torch._foreach_copy_(here, there)
