"""The weights of a trainer that gives them out one after another, each once a sync."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.backend import Delta, Plan
from deltasync.delta.bits import Flat, Run, check_plain, dtype_of, torch_dtype
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import Change, DeltaPlan, HostBackend
from deltasync.delta.modes import in_plain_mode
from deltasync.delta.readers import WireReader, copy_read
from deltasync.delta.shard import whole
from deltasync.errors import ConfigError, SourceChanged
from deltasync.sync.options import SenderOptions, leaves_out
from deltasync.sync.source.layout import SentLayout, specs_of, with_elements
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
        announced: What `take` will bring, in this order and in the dtypes that it comes in, if
            that is known: then engines can connect before the first `take`. Empty if it is not.
    """

    _snapshot: HostBackend | None

    def __init__(
        self, options: SenderOptions | None = None, *, announced: Sequence[ParameterSpec] = ()
    ) -> None:
        super().__init__(options or SenderOptions())
        self._announced = [s for s in announced if not leaves_out(self.options, s.name)]
        self._taken: list[ParameterSpec] = []  # what came first, in the dtypes that it came in
        self._flats: dict[int, Flat] = {}  # of the snapshot
        self._found: _Found | None = None

    @in_plain_mode
    def take(self, weights: NamedWeights) -> None:
        """Go through all weights as they are now. Also to the end if that raises.

        The first time says which there are, in any order; later ones bring the same.

        Raises:
            SourceChanged: A name or a shape is new, one is missing, or they are not as announced.
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
        known = self._taken or self._announced
        if not known:
            raise ConfigError("no weights were taken yet")
        return tuple(known)

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        """Start from what was taken last.

        The first time the snapshot is cast to the dtypes that receivers hold; both are in memory
        then. `wire_dtypes` avoids that.
        """
        before = self.snapshot.ledger.specs
        specs = specs_of(self._taken, held, self.options.wire_dtypes)
        if specs != before != tuple(self._taken):
            raise ConfigError("receivers hold other dtypes than earlier ones: give `wire_dtypes`")
        if self._found is not None:
            self._found.decided()
        elif self._snapshot is not None and self._snapshot.ahead:
            raise ConfigError("the weights that were taken last are not complete: take them again")
        if specs != before:
            tensors = [flat.tensor for flat in self._flats.values()]
            self._begin(specs, dict(enumerate(map(self._copy, specs, tensors))))

    def delta(self, base_version: int) -> Delta:
        """What was taken last, also if it is asked for again."""
        if self._found is None or self._found.is_decided:
            raise ConfigError("there are no new weights: take them before each send_weights")
        self._found.base_version = base_version
        return self._found

    def full(self) -> Plan:
        return self.snapshot.full(bucket_bytes=self._bucket_bytes(self.snapshot))

    @property
    def trained(self) -> NDArray[np.bool_]:
        return np.ones(len(self.snapshot.ledger.specs), np.bool_)

    def _fill(self, weights: NamedWeights) -> None:
        """Make the snapshot."""
        taken: dict[str, ParameterSpec] = {}
        specs: list[ParameterSpec] = []
        flats: dict[int, Flat] = {}
        for name, tensor in weights:
            if name in taken:
                raise ConfigError(f"{name!r} came twice")
            check_plain(tensor, name)
            taken[name] = ParameterSpec((name,), tuple(tensor.shape), dtype_of(tensor, name=name))
            specs += specs_of([taken[name]], (), self.options.wire_dtypes)
            flats[len(flats)] = self._copy(specs[-1], tensor)
        with_elements(tuple(specs))
        if self._announced:
            self._check_announced(list(taken.values()))
        self._begin(specs, flats)
        self._taken = list(taken.values())

    def _begin(self, specs: Sequence[ParameterSpec], flats: dict[int, Flat]) -> None:
        """Take these as the snapshot."""
        devices = {flat.line.device.type for flat in flats.values()}
        chunk_numel = self.options.policy.chunk_numel_on(*devices)
        layout = SentLayout(specs)
        ledger = DigestLedger(whole(layout.specs), chunk_numel=chunk_numel)
        snapshot = HostBackend(flats, ledger)
        ledger.sums[:] = snapshot.measure(np.arange(len(ledger.sums)))
        self.layout, self._snapshot, self._flats = layout, snapshot, flats
        self.snapshot_bytes = snapshot.num_bytes

    def _check_announced(self, taken: Sequence[ParameterSpec]) -> None:
        """Raises SourceChanged, by the first name, if something else was announced."""
        for came, announced in zip_longest(taken, self._announced):
            if came != announced:
                raise SourceChanged(f"{_words(announced)} was announced, and {_words(came)} came")

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
            self.policy(),
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
        policy = self.policy()
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


def _words(spec: ParameterSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.name}: {spec.dtype.name}{list(spec.shape)}"
