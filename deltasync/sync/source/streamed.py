"""The weights of a trainer that gives them out one after another, each once a sync."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.backend import Delta, Plan
from deltasync.delta.bits import (
    Flat,
    Run,
    WireReader,
    check_plain,
    copy_read,
    dtype_of,
    torch_dtype,
)
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import Change, DeltaPlan, HostBackend
from deltasync.delta.shard import whole
from deltasync.errors import ConfigError, SourceChanged
from deltasync.sync.options import SenderOptions, leaves_out
from deltasync.sync.source.layout import SentLayout, specs_of
from deltasync.sync.source.weights import LocalWeights
from deltasync.wire.messages import ParameterSpec

_STEP = 1 << 22  # elements converted at once

NamedWeights = Iterable[tuple[str, Tensor]]
"""(name, whole tensor), each of which may be gone when the next is asked for."""


class StreamedWeights(LocalWeights):
    """What a `WeightSender` sends of a trainer whose weights are gathered, tensor by tensor.

    Call `take` before each `send_weights`. It compares each tensor as it comes with the snapshot
    and keeps what has changed: beside the snapshot what goes sparse, in it what goes dense, so
    that there is no further copy of the model. Parameters of which something was kept in the
    snapshot are sent whole after a sync that came to nothing.

    Args:
        options: `wire_dtypes` says what is sent in another dtype than it comes in.
            `max_inflight_bytes` bounds what is kept beside the snapshot; parameters beyond are
            sent whole. None for no bound: what goes sparse is about half of the model at most.
            `snapshot_device` is also where tensors are compared.
    """

    _snapshot: HostBackend | None

    def __init__(self, options: SenderOptions | None = None) -> None:
        super().__init__(options or SenderOptions())
        self._found: _Found | None = None

    def take(self, weights: NamedWeights) -> None:
        """Go through all weights as they are now. Also to the end if that raises.

        The first time says which there are, in any order; later ones bring the same.

        Raises:
            SourceChanged: A name or a shape is new, or one is missing.
            ConfigError: A name came twice, or a tensor cannot be sent.
        """
        self._found = None
        rest = ((name, t) for name, t in weights if not leaves_out(self.options, name))
        try:
            if self._snapshot is None:
                self._fill(rest)
            else:
                self._compare(rest, self._snapshot)
        finally:
            for _ in rest:  # other ranks may take part in gathering them
                pass

    def declared(self, *, timeout_s: float = 60.0) -> tuple[ParameterSpec, ...]:
        return self._held.ledger.specs

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        """Start from what was taken last."""
        specs = self._held.ledger.specs
        if specs_of(specs, held, {}) != specs:
            raise ConfigError("receivers hold other dtypes than come: give `wire_dtypes`")
        if self._found is not None:
            self._found.decided()
        elif self._snapshot is not None and self._snapshot.ahead:
            raise ConfigError("the weights that were taken last are not complete: take them again")

    def delta(self, base_version: int, *, max_staged_bytes: int = 0) -> Delta:
        """What was taken last, also if it is asked for again."""
        if self._found is None or self._found.is_decided:
            raise ConfigError("there are no new weights: take them before each send_weights")
        self._found.base_version = base_version
        return self._found

    def full(self) -> Plan:
        return self._held.full(bucket_bytes=self._bucket_bytes(self._held))

    @property
    def trained(self) -> NDArray[np.bool_]:
        return np.ones(len(self._held.ledger.specs), np.bool_)

    def _fill(self, weights: NamedWeights) -> None:
        """Make the snapshot."""
        specs: dict[str, ParameterSpec] = {}
        flats: dict[int, Flat] = {}
        for name, tensor in weights:
            if name in specs:
                raise ConfigError(f"{name!r} came twice")
            check_plain(tensor, name)
            own = ParameterSpec((name,), tuple(tensor.shape), dtype_of(tensor, name=name))
            (spec,) = specs_of([own], (), self.options.wire_dtypes)
            flats[len(specs)] = self._copy(spec, tensor)
            specs[name] = spec
        if not specs:
            raise ConfigError("no weights came")
        devices = {flat.line.device.type for flat in flats.values()}
        chunk_numel = self.options.policy.chunk_numel_on(*devices)
        self.layout = SentLayout(tuple(specs.values()))
        ledger = DigestLedger(whole(self.layout.specs), chunk_numel=chunk_numel)
        self._snapshot = HostBackend(flats, ledger)
        self.snapshot_bytes = self._snapshot.num_bytes
        ledger.sums[:] = self._snapshot.measure(np.arange(len(ledger.sums)))

    def _copy(self, spec: ParameterSpec, tensor: Tensor) -> Flat:
        device = self.options.snapshot_device or tensor.device
        copy = Flat.of(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device))
        copy_read(_reader(spec, tensor), copy, step=_STEP)
        return copy

    def _compare(self, weights: NamedWeights, snapshot: HostBackend) -> None:
        """Find what has changed."""
        ledger, found, held_bytes = snapshot.ledger.copy(), list[Change](), 0
        missing = {spec.name: number for number, spec in enumerate(ledger.specs)}
        for name, tensor in weights:
            number = missing.pop(name, None)
            if number is None:
                raise SourceChanged(f"{name!r} is new, or came twice")
            reader = _reader(ledger.specs[number], tensor)
            change = self._change(number, reader, snapshot, ledger, held_bytes)
            if change is not None:
                held_bytes += change.held_bytes
                found.append(change)
        if missing:
            raise SourceChanged(f"{len(missing)} tensors did not come, {min(missing)!r} for one")
        found.sort(key=lambda change: change.parameter)
        self._found = _Found(
            snapshot,
            found,
            ledger,
            self.coding.policy(self.options),
            (),
            bucket_bytes=self._bucket_bytes(snapshot),
            base_version=0,
        )

    def _change(
        self,
        number: int,
        reader: WireReader,
        snapshot: HostBackend,
        ledger: DigestLedger,
        held_bytes: int,
    ) -> Change | None:
        """How a parameter differs. What goes dense is in the snapshot then."""
        limit = self.options.max_inflight_bytes
        room = snapshot.num_bytes * 8 if limit is None else limit - held_bytes
        policy = self.coding.policy(self.options)
        change = snapshot.change(number, reader, policy, ledger=ledger, room=room)
        if change is not None and change.runs is None:
            whole = Run(0, reader.numel)
            nnz, change = change.nnz, Change(number, runs=[whole])
            change.count(whole, nnz, ledger.shares[number])
        for run in () if change is None else change.runs or ():
            if run.bits is None:
                snapshot.write_ahead(number, run, reader.read(run.start, run.stop))
        return change


class _Found(DeltaPlan):
    """What was found while weights passed by; what goes dense is in the snapshot already."""

    is_decided = False

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        return self._snapshot.flats[parameter].read(start, stop)

    def packed(self, parameter: int, run: Run, bits: Tensor) -> None:
        """The snapshot has it, or will when this is decided."""

    def decided(self) -> None:
        super().decided()
        self.is_decided = True
        self.changes.clear()  # their memory


def _reader(spec: ParameterSpec, tensor: Tensor) -> WireReader:
    """Raises SourceChanged for another shape, ConfigError for a dtype that cannot be sent."""
    if tuple(tensor.shape) != spec.shape:
        raise SourceChanged(f"{spec.name}: shape {spec.shape} became {tuple(tensor.shape)}")
    return WireReader.of(tensor.detach().contiguous(), spec.dtype, name=spec.name)
