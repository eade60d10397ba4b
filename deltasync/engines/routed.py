"""A target that writes an engine's weights to where the engine's own loader puts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deltasync.delta.bits import Flat, Live, are_equal, as_bits, identity, torch_dtype
from deltasync.delta.modes import in_plain_mode
from deltasync.delta.naming import suggested
from deltasync.delta.region import Region
from deltasync.engines.proof.cold import refusing_failures
from deltasync.engines.proof.proved import (
    matches,
    prove_routes,
    read_whole,
    refuse_missing,
    refuse_unfilled,
    refuse_unsent,
)
from deltasync.engines.proof.proving import Proof, Upkeep
from deltasync.engines.proof.reach import Reach, named
from deltasync.engines.proof.recomputed import Learnt
from deltasync.engines.routes.codes import CODE_BITS, Codes
from deltasync.engines.routes.recorder import CheckpointTensor, Load, Recording, record
from deltasync.engines.routes.route import Part, Piece
from deltasync.engines.running import as_made
from deltasync.errors import ConfigError, TargetMoved
from deltasync.sync.module import ModuleWatch, named_tensors
from deltasync.sync.target.base import (
    WeightTarget,
    match_parameters,
    refuse_overlap,
    some_of,
)
from deltasync.wire.messages import ParameterSpec

Routes = tuple[Piece, ...]
"""Where the pieces of one checkpoint tensor are kept."""


def _nothing() -> None:
    """What follows a sync unless a target is given something else."""


RELOAD = "for vLLM, EngineSync(without_routes='reload') finds out whether reloading will do"
"""What may help where no route leads."""

_SHOWN = 5  # reasons in an error message
_BLOCK = 1 << 20  # elements that are compared at once


class RoutedTarget(WeightTarget):
    """An engine whose parameters are not the checkpoint's: fused, padded, split over ranks.

    The engine's loader runs once on tensors without data. This shows where the elements of each
    checkpoint tensor are kept, which is where syncs are written. Padding stays as it is.

    Do not use a loader that writes in another thread, or through numpy or dlpack: such writes
    cannot be recorded.

    Args:
        module: The engine's model. It must keep its storage between syncs; if storage is released,
            reloaded or replaced, call the receiver's `invalidate`.
        checkpoint: Names, shapes and dtypes of the tensors that `load` takes.
        load: The loader; by default the module's `load_weights`. It is called when the target is
            first used, and after the engine has replaced storage.
        finish: Called in the pause after every sync, to update what the engine derives from its
            weights. It must leave the weights where they were loaded.
        learnt: What `learn_routes` returned, for an engine whose loader cannot load it a second
            time. Its routes lead to where the engine keeps its parameters now, and small tensors
            of which it computes something are written beside it: that is computed again after each
            write, by its own code, all of it before any is copied to the engine.

    Attributes:
        learnt: The same.
        upkeep: What must be updated after a sync; None for nothing. `verify_routes` finds it; set
            what it found for another target of this module and checkpoint.
    """

    def __init__(
        self,
        module: nn.Module,
        checkpoint: Sequence[CheckpointTensor],
        *,
        load: Load | None = None,
        finish: Callable[[], object] = _nothing,
        learnt: Learnt | None = None,
    ) -> None:
        self._module, self._checkpoint = module, tuple(checkpoint)
        if load is None and learnt is None:
            load = module.load_weights  # type: ignore[assignment]
        self._load, self._finish = load, as_made(module, finish)
        self.learnt = learnt
        self.upkeep: Upkeep | None = None
        self._recomputed = None if learnt is None else learnt.recomputed
        self._laid_out = self._layout()
        self._bindings: dict[str, tuple[Live, ParameterSpec]] = {}  # by own name
        self._names: dict[int, str] = {}  # own, by number
        self._watch = _Watch(module)
        self._recording: tuple[_Watch, Recording] | None = None

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Return the checkpoint tensors of which the loader takes something.

        Raises:
            ConfigError: Tensors have no route; the message says which, and why.
        """
        return self._specs(self._recorded())

    def bind(self, layout: Sequence[ParameterSpec]) -> Mapping[int, Live]:
        """Find each parameter of the layout in the engine. Also raises what `parameters` does."""
        recording = self._recorded()
        held = self._specs(recording)
        numbers = match_parameters(held, layout)
        live = self._live()
        pieces = recording.pieces
        try:
            accesses = [_access(pieces[spec.name], live, spec) for spec in held]
        except ConfigError as error:
            raise ConfigError(f"{error}; {RELOAD}") from error
        refuse_overlap(held, accesses)
        assert self._recording is not None
        self._watch = self._recording[0]
        self._names = {number: spec.name for number, spec in zip(numbers, held, strict=True)}
        self._bindings = {s.name: (live, s) for s, live in zip(held, accesses, strict=True)}
        if self._recomputed is not None:
            self._recomputed.look()
        return dict(zip(numbers, accesses, strict=True))

    @in_plain_mode
    def verify_routes(
        self,
        weights: Iterable[tuple[str, Tensor]],
        proof: Callable[[], Proof] | None = None,
        *,
        keep: Collection[str] = (),
        routes: Mapping[str, Routes] | None = None,
    ) -> None:
        """Prove that writes through routes reach everything that the engine computes with.

        Reads back the checkpoint that the engine was started on, then runs `prove_routes`. The
        engine must not run meanwhile. It holds the same weights afterwards.

        Args:
            weights: The checkpoint that the engine was started on.
            proof: Creates what updates are compared with. Without it, nothing is known about what
                the engine derives from its weights, or keeps a second time.
            keep: Patterns, as in `fnmatch`, of checkpoint tensors that may stay as they are.
            routes: Routes of this engine that were proved earlier, by name. What lies there may
                have been written since, so it is not read back.

        Raises:
            ConfigError: Names tensors that are not where the loader puts them, that the trainer
                does not send, or that would be stale.
            DirtyReceiver: The engine's weights could not be restored.
        """
        layout = self.parameters()
        numbers = {name: number for number, spec in enumerate(layout) for name in spec.names}
        missing = {number: spec.name for number, spec in enumerate(layout)}
        held = self.bind(layout)
        wrong: dict[int, str] = {}
        ours, proved = self.routes(), routes or {}
        right = {numbers[name] for name, one in ours.items() if one == proved.get(name)}
        others: list[str] = []
        loaded: list[CheckpointTensor] = []
        for name, tensor in weights:
            if not matches(name, keep):
                loaded.append(CheckpointTensor(name, tuple(tensor.shape), tensor.dtype))
            if (number := numbers.get(name)) is None:
                others.append(name)
                continue
            missing.pop(number, None)
            if number in right or self._takes(held[number], tensor, layout[number]):
                right.add(number)
            else:
                wrong.setdefault(number, name)
        for number in right & wrong.keys():  # of several names the engine takes one
            del wrong[number]
        refuse_missing(missing.values(), others)
        if wrong:
            raise _misplaced(sorted(wrong.values()))
        if self._recomputed is not None:
            self._recomputed.verify(self._read)
        if proof is not None:
            self._prove(proof(), loaded)

    def _takes(self, live: Live, tensor: Tensor, spec: ParameterSpec) -> bool:
        """Whether a tensor that the engine was started on is where its route leads.

        Fills what is kept beside the engine.
        """
        beside = {} if self._recomputed is None else self._recomputed.beside
        is_beside = any(one.live in beside for one in self._recorded().pieces[spec.name])
        if self._recomputed is not None and is_beside and tensor.numel() == spec.numel:
            wanted = tensor.to(live.line.device, torch_dtype(spec.dtype)).contiguous()
            live.write(0, as_bits(wanted).view(-1))
            self._recomputed.fix(spec.name)
        return _holds(live, tensor, spec)

    def routes(self) -> dict[str, Routes]:
        """Return where the elements of each of `parameters` are kept, by each of its names.

        Not of fixed tensors, which are read back each time.
        """
        assert self._recording is not None
        recording = self._recording[1]
        specs = [one for one in self._specs(recording) if one.name not in recording.fixed]
        return {name: recording.pieces[one.name] for one in specs for name in one.names}

    def filled(self) -> set[str]:
        """Names of the engine's tensors of which a full sync writes every element.

        Raises what `parameters` does.
        """
        recording, written = self._recorded(), defaultdict[str, int](int)
        for name, pieces in recording.pieces.items():
            for piece in pieces:
                bits = 8 * recording.dtypes[name].item_size if piece.code is None else CODE_BITS
                written[piece.live] += piece.target.numel * bits
        return {name for name, one in self._live().items() if written[name] == 8 * one.nbytes}

    @refusing_failures()
    def _prove(self, proof: Proof, loaded: Sequence[CheckpointTensor]) -> None:
        refuse_unsent(proof, loaded, {name for one in self._checkpoint for name in one.names})
        self.upkeep = prove_routes(proof, self._recorded(), self._bindings, self._recomputed)

    @in_plain_mode
    @refusing_failures()
    def verify_updates(self, proof: Proof, *, keep: Collection[str] = ()) -> None:
        """Like `verify_routes`, for an engine whose loaded weights are unknown: reads nothing back.

        Here `keep` has the engine's own names. Raises as `verify_routes`.
        """
        self.bind(self.parameters())
        recording = self._recorded()
        written = {piece.live for pieces in recording.pieces.values() for piece in pieces}
        refuse_unfilled(proof, written, keep)
        self.upkeep = prove_routes(proof, recording, self._bindings, self._recomputed)

    def check_unmoved(self) -> None:
        """Raise TargetMoved if a tensor's address, size, strides or dtype has changed.

        The engine may replace buffers that neither a checkpoint nor a route knows: the tables of
        rotary embeddings get another dtype when they are first used.
        """
        if not self._watch.is_unmoved():
            raise TargetMoved("storage of the engine was replaced; rejoin")

    def finish(self, changed: Collection[int] | None = None) -> None:
        """Update what is derived. Raises TargetMoved if that moves the weights.

        After a delta after which none of the engine's code ran, nothing could have moved them. Then
        they are not checked a second time within the pause.
        """
        self._finish()
        has_run = changed is None or self._finish is not _nothing
        upkeep = self.upkeep if self.upkeep is not None and self.upkeep.steps else None
        follows = [one for one in (self._recomputed, upkeep) if one is not None]
        if follows:
            names = None if changed is None else {self._names[n] for n in changed}
            for one in follows:
                has_run |= one.run(self._read, names)
        if has_run:
            self.check_unmoved()

    def _read(self, name: str) -> Tensor:
        return read_whole(*self._bindings[name])

    def _live(self) -> dict[str, Tensor]:
        return named(self._module) | ({} if self._recomputed is None else self._recomputed.beside)

    def _layout(self) -> dict[str, tuple[object, ...]]:
        """What learnt routes depend on, by parameter."""
        return {
            name: (one.shape, one.stride(), one.storage_offset(), one.dtype)
            for name, one in (self._live() if self.learnt is not None else {}).items()
        }

    def _specs(self, recording: Recording) -> tuple[ParameterSpec, ...]:
        return tuple(
            ParameterSpec(one.names, one.shape, recording.dtypes[one.name])
            for one in self._checkpoint
            if recording.pieces[one.name]
        )

    def _recorded(self) -> Recording:
        """The routes as of now. Raises ConfigError if a tensor has none."""
        if self._recording is not None and self._recording[0].is_unmoved():
            return self._recording[1]
        recording = self._watched()
        whys = {f"{name!r} {why}" for name, why in recording.refused.items()}
        whys |= {f"{name!r}: {why}" for name, why in recording.uncovered.items()}
        if self._checkpoint and not whys and not any(recording.pieces.values()):
            names = [one.name for one in self._checkpoint]
            raise ConfigError(
                f"the loader takes nothing of any tensor that is sent, {some_of(names)}"
                f"{suggested(names, self._live().keys(), are_sent=True)}"
            )
        if whys:
            shown = "; ".join(sorted(whys)[:_SHOWN])
            more = f"; and {len(whys) - _SHOWN} more" if len(whys) > _SHOWN else ""
            raise ConfigError(f"{len(whys)} tensors have no route: {shown}{more}; {RELOAD}")
        self._recording = _Watch(self._module, recording), recording
        return recording

    def _watched(self) -> Recording:
        """What the loader does, or did. Raises ConfigError if it cannot be watched."""
        if self._layout() != self._laid_out:
            raise ConfigError(
                "the engine has laid out its parameters in another way since routes to them were "
                "learnt: restart it"
            )
        if self.learnt is not None:
            return self.learnt
        assert self._load is not None
        with self._kept():
            try:
                return record(as_made(self._module, self._load), self._checkpoint, self._live())
            except ConfigError as error:
                if error.__cause__ is None:  # no loader raised it, and reloading meets it too
                    raise
                raise ConfigError(f"{error}; {RELOAD}") from error

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Restore what the loader replaces. Raise ConfigError if it replaced a tensor."""
        reach, before = Reach([("", self._module)]), self._live()
        replaced: list[str] = []
        try:
            yield
        finally:
            now = self._live()
            replaced = sorted(n for n in before | now if before.get(n) is not now.get(n))
            reach.put_back()
        if replaced:
            raise ConfigError(
                f"{len(replaced)} tensors have no route: the loader replaces {some_of(replaced)}, "
                f"where it should fill them; {RELOAD}"
            )


class _Watch:
    """Checks whether what is registered is where it was, but for buffers that nothing writes.

    Args:
        module: As of `ModuleWatch`.
        recording: The routes into it.
    """

    def __init__(self, module: nn.Module, recording: Recording | None = None) -> None:
        pieces = [] if recording is None else recording.pieces.values()
        self._routed = {piece.live for each in pieces for piece in each}
        self._module, self._watch = module, ModuleWatch(module)
        self._places = self._now()

    def is_unmoved(self) -> bool:
        """Whether it is."""
        if not self._watch.is_unmoved():
            if self._now() != self._places:
                return False
            self._watch = ModuleWatch(self._module)
        return True

    def _now(self) -> dict[str, tuple[object, ...]]:
        """Where each tensor is, by name; nothing for a buffer of no checkpoint and no route."""
        written = self._routed | {name for name, _ in named_tensors(self._module)}
        return {
            name: identity(tensor) if name in written else ()
            for name, tensor in named(self._module).items()
        }


def pieces_of(target: RoutedTarget) -> Mapping[str, Routes] | None:
    """The routes that a target has recorded, by name; None before."""
    return None if target._recording is None else target._recording[1].pieces


def _misplaced(names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{len(names)} tensors have no route: {some_of(names)} are not where the loader puts what "
        "the engine was started on: the engine changes its layout after loading, or a trainer has "
        "written them since, which did not send them by routes: restart the engine, and connect "
        f"first with all tensors that are to be sent; {RELOAD}"
    )


def _access(pieces: Sequence[Piece], live: Mapping[str, Tensor], spec: ParameterSpec) -> Live:
    """Access to a whole checkpoint tensor, or to the parts of it that are held."""
    if any(piece.code is not None for piece in pieces):
        return Codes(pieces, live, spec.dtype, spec.numel)
    dtype = torch_dtype(spec.dtype)
    live = {piece.live: _seen_as(live[piece.live], dtype) for piece in pieces}
    if not spec.numel or [one.source for one in pieces] == [Region.run(0, spec.numel)]:
        return Flat.of(pieces[0].target.view(live[pieces[0].live]), name=spec.name)
    return Part.of(pieces, live, name=spec.name)


def _seen_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A live tensor, or all of its storage in another dtype: kernels see bits as they like."""
    if tensor.dtype == dtype:
        return tensor
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


def _holds(live: Live, tensor: Tensor, spec: ParameterSpec) -> bool:
    """Whether these weights are held. Compares in blocks, to bound the memory for positions."""
    wanted = tensor.reshape(-1)
    for start in range(0, spec.numel, _BLOCK):
        stop = min(start + _BLOCK, spec.numel)
        bits = as_bits(wanted[start:stop].to(live.line.device, torch_dtype(spec.dtype)))
        positions = live.held(start, stop)
        here = bits if positions is None else bits[positions - start]
        if not are_equal(live.read(start, stop), here):
            return False
    return True
