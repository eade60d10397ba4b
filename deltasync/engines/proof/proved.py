"""The two proofs: of writing through routes, and of reloading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.delta.bits import Live, as_bits, storage_of, torch_dtype
from deltasync.delta.naming import suggested
from deltasync.engines.proof.cold import FAILURES
from deltasync.engines.proof.other_weights import other_bits
from deltasync.engines.proof.proving import (
    Bits,
    Fresh,
    Group,
    Proof,
    Snapshot,
    Step,
    Upkeep,
    groups_of,
    under,
)
from deltasync.engines.proof.reach import Copies, Reach, is_handle, named, settle
from deltasync.engines.proof.recomputed import Recomputed
from deltasync.engines.routes.operations import Alone
from deltasync.engines.routes.recorder import CheckpointTensor, Recording, record
from deltasync.engines.running import raise_lack_of_memory
from deltasync.errors import ConfigError, DirtyReceiver, EngineFailed
from deltasync.sync.target.base import some_of
from deltasync.wire.messages import ParameterSpec

_SHOWN = 3
_MAY_RAISE = 8  # tensors at which a loader may raise: the engine was started without

HeldTensors = Mapping[str, tuple[Live, ParameterSpec]]
"""Where a checkpoint tensor is kept, and what it is."""


def read_whole(live: Live, spec: ParameterSpec) -> Tensor:
    """A copy of a checkpoint tensor as it is held, with zeros where another rank holds it."""
    positions, bits = live.held(0, spec.numel), live.read(0, spec.numel)
    if positions is None:
        return bits.clone().view(torch_dtype(spec.dtype)).view(spec.shape)
    whole = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=live.line.device)
    as_bits(whole).view(-1)[positions] = bits
    return whole


def prove_routes(
    proof: Proof, recording: Recording, held: HeldTensors, recomputed: Recomputed | None = None
) -> Upkeep:
    """Prove that what is written through routes reaches everything that the engine computes with.

    The weights must be those that the engine was started on. They are restored at the end.

    Args:
        proof: The proof of the engine.
        recording: What its loader does with the checkpoint tensors.
        held: Where those tensors are kept.
        recomputed: What is computed again after each write.

    Returns:
        What must follow each write of weights, besides.

    Raises:
        ConfigError: Something would be stale; the message names the path.
        DirtyReceiver: The weights could not be restored.
    """
    upkeep = Upkeep(proof.startup, proof.model, recording.given)
    with proof.apart():
        for group in groups_of(recording, proof.scopes.names()):
            if group.names:
                _Routed(proof, recording, held, upkeep, group, recomputed).prove()
    return upkeep


class _Routed:
    """The proof of one group."""

    def __init__(
        self,
        proof: Proof,
        recording: Recording,
        held: HeldTensors,
        upkeep: Upkeep,
        group: Group,
        recomputed: Recomputed | None,
    ) -> None:
        self._proof, self._held, self._upkeep, self._group = proof, held, upkeep, group
        self._live_names = {
            name: tuple({piece.live: None for piece in recording.pieces[name]})
            for name in group.names
        }
        live = named(proof.model)
        self._weights = {n for names in self._live_names.values() for n in names if n in live}
        self._recomputed = recomputed
        self._beside = [] if recomputed is None else [recomputed.keep(group.scopes)]
        self._kept = proof.keep(group.scopes, [live[name] for name in self._weights])

    def prove(self) -> None:
        names = self._group.names
        others = {name: other_bits(self._read(name), name) for name in names}
        with putting_back(self._kept, *self._beside):
            fresh = self._proof.started(
                self._group,
                self._upkeep.given,
                others=others.items,
                own=lambda: ((name, self._read(name)) for name in names),
                kept=self._kept,
            )
            refuse(fresh.alone, "the engine made when it started, and nothing makes it again")
            if stale := self._stale_after(Step(), others, fresh):
                self._proof.check_apart()  # before the live one's work writes there
            for step in self._steps(stale) if stale else ():
                if not self._stale_after(step, others, fresh):
                    self._upkeep.steps[frozenset(self._group.names)] = step
                    return
            refuse(stale, "the engine computes with it, and nothing brings it up to date")

    def _steps(self, stale: Sequence[str]) -> Iterator[Step]:
        """Steps that may update what is stale, the smallest first."""
        inside = self._proof.scopes.modules(self._group.scopes)
        owners = {n: m for n, m in inside.items() if any(p.startswith(f"{n}.") for p in stale)}
        modules = tuple(owners.values())
        innermost = {
            max((n for n in owners if p.startswith(f"{n}.")), key=len, default="") for p in stale
        }
        near = tuple(
            name
            for name, lives in self._live_names.items()
            if any(live.startswith(f"{owner}.") for live in lives for owner in innermost)
        )
        yield Step(modules=modules)
        yield Step(names=near)
        yield Step(names=self._group.names)
        yield Step(names=self._group.names, modules=tuple(inside.values()))

    def _stale_after(self, step: Step, others: Bits, fresh: Fresh) -> list[str]:
        """Paths that are wrong after other weights were written, or after the own ones were."""
        self._kept.put_back()
        for name, tensor in others.items():
            self._held[name][0].write(0, as_bits(tensor).view(-1))
        self._recompute()
        stale = self._after(step, fresh.tensors, fresh.values)
        if stale or (step == Step() and not self._beside):
            return stale
        for path in self._weights:
            as_bits(self._kept.founds[path].alias).copy_(as_bits(self._kept.bits[path]))
        for beside in self._beside:
            beside.put_back()
        self._recompute()
        return self._after(step, None, {path: self._kept.values[path] for path in fresh.values})

    def _recompute(self) -> None:
        """Raises ConfigError."""
        if self._recomputed is not None:
            try:
                self._recomputed.run(self._read, self._group.names)
            except EngineFailed as error:
                raise ConfigError(str(error)) from error

    def _after(self, step: Step, expected: Bits | None, values: Mapping[str, Any]) -> list[str]:
        if step == Step():
            return self._kept.changed(expected) + self._kept.unlike(values)
        everything = Reach([("", self._proof.model)])
        try:
            self._upkeep.take(step, self._read)
            moved = {p: found for p, found in everything.tensors.items() if found.is_moved}
            settle(moved)
            unlike = self._kept.unlike(values)
        except FAILURES as error:  # this step does not work
            raise_lack_of_memory(error)
            return ["?"]
        finally:
            everything.put_back()
        self._upkeep.moved |= moved
        return self._kept.changed(expected) + unlike

    def _read(self, name: str) -> Tensor:
        return read_whole(*self._held[name])


def prove_reload(
    proof: Proof,
    weights: Mapping[str, Tensor],
    given: Mapping[str, tuple[str, ...]],
    reload: Callable[[Iterable[tuple[str, Tensor]]], object],
) -> None:
    """Prove that reloading a checkpoint leaves an engine as if it had been started on it.

    Args:
        proof: The proof of the engine.
        weights: By name, what the engine was started on.
        given: The names under which its loader takes each of these.
        reload: Reloads the engine.

    Raises:
        ConfigError: Something would be stale, or a reload of the same weights changes it; the
            message names the path.
        DirtyReceiver: The weights could not be restored.
    """
    checkpoint = [
        CheckpointTensor(name, tuple(one.shape), one.dtype, tuple(set(given[name]) - {name}))
        for name, one in weights.items()
    ]
    recording = recorded(proof, checkpoint)
    groups = groups_of(recording, proof.scopes.names())
    unsent = _unsent(proof, recording)
    kept = {group: proof.keep(group.scopes) for group in groups}
    with (
        putting_back(*kept.values(), Reach([("", proof.model)])),
        proof.apart(),
        torch.no_grad(),
    ):
        with in_place(proof.model), Alone():
            reload(under(given, _other_weights(weights)))
        stale: list[str] = []
        own: list[tuple[Snapshot, dict[str, Any]]] = []
        for group, here in kept.items():
            own_weights = {name: weights[name] for name in group.names}
            fresh = proof.started(
                group,
                given,
                others=partial(_other_weights, own_weights),
                own=own_weights.items,
                kept=here,
            )
            wrong = {*here.changed(fresh.tensors), *here.unlike(fresh.values), *fresh.alone}
            # Handles stay where their weights do, and a fresh engine's have other bits.
            handles = {path for path, found in here.founds.items() if is_handle(found.alias)}
            stale += [p for p in wrong if not (p in handles and p.startswith(unsent))]
            own.append((here, {path: here.values[path] for path in fresh.values}))
        refuse(stale, "the engine computes with it, and reloading does not bring it up to date")
        with in_place(proof.model):
            reload(under(given, weights.items()))
        again = [path for here, values in own for path in here.changed() + here.unlike(values)]
        refuse(again, "it is not what it was when the engine reloads what it was started on")


def _other_weights(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name, other_bits(tensor, name)) for name, tensor in weights.items())


def _unsent(proof: Proof, sent: Recording) -> tuple[str, ...]:
    """How paths begin in modules that have parameters, of which nothing is sent."""
    live = named(proof.cold.model)
    written = {storage_of(live[name]) for name in sent.written}
    return tuple(
        f"{name}."
        for name, module in proof.cold.model.named_modules()
        if (own := {storage_of(one) for one in module.parameters(recurse=False)})
        if own.isdisjoint(written) and not module._modules
    )


def recorded(
    proof: Proof, checkpoint: Sequence[CheckpointTensor], *, may_raise: int = 0
) -> Recording:
    """Where the second instance's loader puts checkpoint tensors. Raises as `record` does."""
    model, live = proof.cold.model, named(proof.cold.model)
    with putting_back(Reach([("", model)])):
        return record(
            lambda given: proof.startup.load(model, given), checkpoint, live, may_raise=may_raise
        )


def refuse_missing(missing: Iterable[str], others: Sequence[str]) -> None:
    """Raise ConfigError, by name, if the engine's own checkpoint lacks tensors that are sent.

    Args:
        missing: Names that it does not have.
        others: Names that it has and that are not sent.
    """
    if names := sorted(missing):
        raise ConfigError(
            f"the checkpoint that the engine was started on has no {some_of(names)}"
            f"{suggested(names, others, are_sent=True)}: start the engine on a checkpoint that "
            "has it, as the trainer's model is saved"
        )


def refuse_unsent(proof: Proof, loaded: Sequence[CheckpointTensor], names: Collection[str]) -> None:
    """Refuse weights that the engine was started on and that the trainer does not send.

    Args:
        proof: The proof of the engine.
        loaded: The checkpoint that it was started on, without what may stay.
        names: What the trainer sends.

    Raises:
        ConfigError: There are such weights; the message names one.
    """
    both = [one for one in loaded if one.name in names]
    live, every = named(proof.model), recorded(proof, loaded, may_raise=_MAY_RAISE).written
    written = recorded(proof, both, may_raise=_MAY_RAISE).written
    sent = {storage_of(live[one]) for one in written if one in live}
    unsent = {
        one: name
        for one, name in every.items()
        if one in live and storage_of(live[one]) not in sent
    }
    if unsent:
        one, name = min(unsent.items())
        raise ConfigError(
            f"{len(unsent)} tensors of the engine, {one!r} among them, were loaded from the "
            f"checkpoint that it was started on ({name!r}) and are not sent by the trainer: they "
            "would stay as they are; send them, or name them in `keep`"
        )


def refuse_unfilled(proof: Proof, names: Collection[str], keep: Collection[str]) -> None:
    """Do the same if it is not known what the engine loaded: check all that its start leaves empty.

    Args:
        proof: The proof of the engine.
        names: Its parameters and buffers that the trainer's weights go to.
        keep: Patterns of those that may stay, by the engine's names.

    Raises:
        ConfigError: There are others; the message names one.
    """
    live = named(proof.model)
    sent = {storage_of(live[name]) for name in names}
    empty = [
        name
        for name, tensor in named(proof.cold.model).items()
        if tensor.is_meta and tensor.numel() and name in live
        if storage_of(live[name]) not in sent and not matches(name, keep)
    ]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors of the engine, {min(empty)!r} among them, are not sent by the "
            "trainer: they would stay as they are; send them, or name them in `keep`"
        )


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name matches one of these `fnmatch` patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def in_place(model: nn.Module | None) -> Iterator[None]:
    """Copy tensors that are replaced inside back to their old storage; undo all if it raises."""
    before = Reach([] if model is None else [("", model)])
    try:
        yield
    except BaseException:
        before.put_back()
        raise
    settle(before.tensors)


@contextmanager
def putting_back(*kept: Snapshot | Reach | Copies) -> Iterator[None]:
    """Restore everything at the end. Raises DirtyReceiver if that fails."""
    try:
        yield
    finally:
        try:
            _put_back(kept)
        except Exception as error:
            raise DirtyReceiver(
                f"the engine's weights could not be put back ({error!r}): restart the engine"
            ) from error


def _put_back(kept: Sequence[Snapshot | Reach | Copies]) -> None:
    """Restore all. An interrupt is raised only after all was restored from the beginning."""
    try:
        for one in kept:
            one.put_back()
    except Exception:
        raise
    except BaseException:
        _put_back(kept)
        raise


def refuse(paths: Collection[str], why: str) -> None:
    """Raise ConfigError if there are any paths."""
    if paths:
        shown = ", ".join(repr(path) for path in sorted(paths)[:_SHOWN])
        raise ConfigError(f"{len(paths)} tensors of the engine have no route: {shown}: {why}")
