"""What the weights had at an older version: kept as deltas go out, and what folds are coded by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.backend import Digests, Encode, Payload, Plan
from deltasync.delta.bits import Live, Run, integer_dtype
from deltasync.delta.codecs.coding import DENSE_ABOVE
from deltasync.delta.codecs.old import LiveOld, OldRows
from deltasync.delta.fold import fold_runs
from deltasync.store.catalogue import Published
from deltasync.store.folding import FoldedPlan, OverlaidFlat
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import MAX_SPARSE_SPAN, ROW, RowKind, Rows, block_offsets

logger = logging.getLogger(__name__)


class UndoLog:
    """The bits that elements had at a base version, wherever something has changed since.

    Each payload that is published goes through `watched`, which keeps the old bits of what it
    changes. Of an element that changes several times, the first ones are those of the base. What
    comes of a delta that was never published is true as well, and does no harm.

    Memory, on the host: an index and the old bits for each change, 6 bytes for bfloat16. What
    exceeds `max_bytes` is given up until the next `begin`.

    Args:
        max_bytes: The most to keep.

    Attributes:
        base: The version that it leads back to; None while nothing is kept.
        specs: The layout of what was watched.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.base: Published | None = None
        self._num_bytes = 0
        self._undo: dict[int, list[list[Run]]] = {}
        self._unknown: set[int] = set()  # parameters of which the old bits were not to be had
        self.specs: Sequence[ParameterSpec] = ()

    def begin(self, base: Published | None) -> None:
        """Forget everything, and go on from this version; None to keep nothing."""
        self.base, self._num_bytes = base, 0
        self._undo.clear()
        self._unknown.clear()

    def watched(self, plan: Plan, specs: Sequence[ParameterSpec]) -> Plan:
        """The same plan; what its payloads change is kept as they are packed.

        Args:
            plan: A delta.
            specs: The layout; the same since `begin`.
        """
        self.specs = specs
        return plan if self.base is None else _Watched(plan, self.take)

    def take(self, payload: Tensor, num_rows: int, old: OldRows | None) -> None:
        """Keep what a payload changes. Arguments as of `Coder.coded`."""
        if self.base is None:
            return
        raw, found = payload.cpu().numpy(), dict[int, list[Run]]()
        rows: Rows = raw[: num_rows * ROW.itemsize].view(ROW)
        index_at, _, _ = block_offsets(rows)
        for place, (row, at) in enumerate(zip(rows, index_at.tolist(), strict=True)):
            run = self._old_run(place, row, raw[at : at + int(row["index_bytes"])], old)
            found.setdefault(int(row["parameter"]), []).append(run)
            self._num_bytes += _num_bytes(run)
        for parameter, runs in found.items():
            self._undo.setdefault(parameter, []).append(runs)
        if self._num_bytes > self._max_bytes:
            self._merge()
        if self._num_bytes > self._max_bytes:
            logger.info("nothing is folded from v%d on: more than %d bytes have changed",
                        self.base.version, self._max_bytes)  # fmt: skip
            self.begin(None)

    def fold(self, flats: Mapping[int, Live], digest: int) -> FoldedPlan:
        """All changes since the base as one delta, to be sent before the weights change again.

        Elements that are as they were are left out, but for the first of a parameter of which
        nothing else is left: readers demand bytes for each parameter that has changed meanwhile.

        Args:
            flats: The weights as they are now, by parameter. Not owned.
            digest: Their state digest.
        """
        assert self.base is not None
        self._merge(flats)
        undo = {n: runs for n in sorted(self._undo) for runs in self._undo[n]}
        known = undo.keys() - self._unknown
        before = {n: OverlaidFlat(flats[n], undo[n]) for n in known}

        def forward(parameter: int, run: Run) -> Run:
            return replace(run, bits=_bits_now(flats[parameter], run))

        return FoldedPlan.of(
            self.specs,
            [(parameter, run) for parameter, runs in undo.items() for run in runs],
            base_version=self.base.version,
            digest=digest,
            filled=forward,
            old=LiveOld(self.specs, before),
        )

    def _old_run(
        self, place: int, row: np.void, index: NDArray[np.uint8], old: OldRows | None
    ) -> Run:
        """What an entry of a table changes, with the bits from before."""
        parameter, start, span = int(row["parameter"]), int(row["start"]), int(row["span"])
        spec, indices, found = self.specs[parameter], None, None
        if row["kind"] == RowKind.DENSE:
            if old is not None:
                found = old.run(place, parameter, start, start + span)
        else:
            indices = index.view(np.int32).copy()
            if old is not None:
                found = old.at(place, parameter, start, indices)
        if found is None:
            self._unknown.add(parameter)
            bits = torch.zeros(int(row["count"]), dtype=integer_dtype(spec.dtype), device="cpu")
        else:
            bits = torch.from_numpy(found[0].view(np.uint8)).view(integer_dtype(spec.dtype))
        return Run(start, span, None if indices is None else torch.from_numpy(indices), bits)

    def _merge(self, flats: Mapping[int, Live] | None = None) -> None:
        """Keep one entry of each element; only of those that differ now, if weights are given."""
        self._num_bytes = 0
        for parameter, entries in self._undo.items():
            numel = self.specs[parameter].numel
            runs = fold_runs(entries[::-1], numel)  # the first entry of an element wins
            if flats is not None and parameter not in self._unknown:
                runs = _differing(runs, flats[parameter]) or [_first_of(runs[0])]
            self._undo[parameter] = [runs]
            self._num_bytes += sum(map(_num_bytes, runs))


class _Watched:
    """A plan that shows its payloads as they are packed. See `delta.backend.Plan`."""

    def __init__(self, plan: Plan, show: Show) -> None:
        self._plan, self._show = plan, show
        self.base_version = plan.base_version
        self.sparse_bytes, self.dense_bytes = plan.sparse_bytes, plan.dense_bytes

    @property
    def ledger(self) -> Digests:
        return self._plan.ledger

    def buckets(self) -> Iterator[Payload]:
        """Payloads."""
        return (_WatchedPayload(payload, self._show) for payload in self._plan.buckets())

    def decided(self) -> None:
        """The version is final."""
        self._plan.decided()


class _WatchedPayload:
    """One of its payloads. See `delta.backend.Payload`."""

    def __init__(self, payload: Payload, show: Show) -> None:
        self._payload, self._show = payload, show
        self.num_bytes, self.num_rows = payload.num_bytes, payload.num_rows
        self.device, self.old = payload.device, payload.old

    def encoder(self, codec: IndexCodec) -> Encode | None:
        """That of the payload."""
        return self._payload.encoder(codec)

    def write(self, payload: Tensor, written: Callable[[], None] | None = None) -> None:
        """Write it, and show it before what it changes is overwritten."""

        def shown() -> None:
            self._show(payload, self.num_rows, self.old)
            if written is not None:
                written()

        self._payload.write(payload, shown)


Show = Callable[[Tensor, int, OldRows | None], None]
"""(payload as it was packed, rows of its table, what they change)."""


def _num_bytes(run: Run) -> int:
    assert run.bits is not None
    return run.bits.nbytes + (0 if run.indices is None else run.indices.nbytes)


def _bits_now(flat: Live, run: Run) -> Tensor:
    """int[count], on the host: what the weights have where a run writes."""
    if run.indices is None:
        return flat.read(run.start, run.stop).cpu()
    return flat.gather(run.positions().to(flat.line.device)).cpu()


def _differing(runs: Sequence[Run], flat: Live) -> list[Run]:
    """What of these runs the weights have other bits for; dense where most of a run is."""
    found = []
    for run in runs:
        assert run.bits is not None
        differs = _bits_now(flat, run) != run.bits
        if not (count := int(differs.sum())):
            continue
        indices = run.indices
        if indices is not None:
            indices = indices[differs]
        elif count <= DENSE_ABOVE * run.span and run.span <= MAX_SPARSE_SPAN:
            indices = differs.nonzero().view(-1).to(torch.int32)
        bits = run.bits if indices is None else run.bits[differs]
        found.append(Run(run.start, run.span, indices, bits))
    return found


def _first_of(run: Run) -> Run:
    """Its first element."""
    assert run.bits is not None
    if run.indices is None:
        return Run(run.start, 1, None, run.bits[:1])
    return Run(run.start, run.span, run.indices[:1], run.bits[:1])
