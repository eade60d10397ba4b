"""deltasync's own diff without a session: what a sync calls, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.gpu.baselines import Found
from deltasync import Policy
from deltasync.delta.backend import Delta, snapshot_of
from deltasync.delta.bits import Flat, Run, dtype_of
from deltasync.delta.bucket import BucketReader
from deltasync.delta.patch import chunk_numel_on
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.wire.messages import ParameterSpec

ALWAYS_SPARSE = Policy(dense_above=1.0)
BUCKET_BYTES = 256 << 20  # the default of SenderOptions
_SPARSE_BYTES = 6  # of a changed bf16 element


class Differ:
    """Compares a module with what it was when this was made: every change sparse.

    Attributes:
        old: What it was, flat.
        changed: How many changes there may be: so many are kept in memory, as in a sync whose
            `max_inflight_bytes` suffice.
    """

    def __init__(self, module: nn.Module, *, snapshot_device: torch.device | None = None) -> None:
        specs, self._readers = layout_of(module)
        self.specs = tuple(specs)
        chunk_numel = chunk_numel_on(self._readers[0].flat.line.device.type)
        self._snapshot = snapshot_of(
            whole(specs),
            self._readers,
            chunk_numel=chunk_numel,
            device=snapshot_device,
        )
        self.old = [f.tensor for f in self._snapshot.flats.values() if isinstance(f, Flat)]
        self.changed = 0
        device = self._readers[0].flat.line.device
        self._payload = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)

    def find(self) -> None:
        """Indices, values and the digests' change, on the device."""
        self._plan()

    def count(self) -> int:
        """How many elements have changed. So many are kept from now on."""
        self.changed = 0  # so that it does not matter how many can be kept
        self.changed = self._plan().nnz
        return self.changed

    def found(self) -> Found:
        """The same, kept: (int32 indices, values) of each parameter."""
        opener = BucketReader(self.specs)
        found: dict[int, list[Run]] = {}
        for payload, num_rows in self._payloads():
            for number, run in opener.read(payload.clone(), num_rows):
                found.setdefault(number, []).append(run)
        return [_joined(found.get(number, []), old) for number, old in enumerate(self.old)]

    def _payloads(self) -> Iterator[tuple[Tensor, int]]:
        """(payload, rows), valid until the next one is asked for."""
        plan = self._plan()
        for bucket in plan.buckets():
            payload = self._payload[: bucket.num_bytes]
            bucket.write(payload)
            yield payload, bucket.num_rows
        if plan.ledger.total == self._snapshot.ledger.total:
            raise RuntimeError("the digest has not changed")

    def _plan(self) -> Delta:
        plan = self._snapshot.compare(
            self._readers,
            policy=ALWAYS_SPARSE,
            bucket_bytes=BUCKET_BYTES,
            # Twice what they take: what says where they are counts among it.
            max_held_bytes=max(self._snapshot.num_bytes // 20, 2 * _SPARSE_BYTES * self.changed),
            base_version=0,
        )
        if self.changed and plan.held_bytes < _SPARSE_BYTES * plan.nnz:
            raise RuntimeError("not all changes were kept")
        return plan


def layout_of(module: nn.Module) -> tuple[list[ParameterSpec], list[WireReader]]:
    """A module's parameters as the sender sees them."""
    specs, readers = [], []
    for name, parameter in module.named_parameters():
        dtype = dtype_of(parameter)
        specs.append(ParameterSpec((name,), tuple(parameter.shape), dtype))
        readers.append(WireReader.of(parameter, dtype, name=name))
    return specs, readers


def _joined(runs: list[Run], like: Tensor) -> tuple[Tensor, Tensor]:
    """The runs of one parameter as (int32 indices, int16 values)."""
    nothing = torch.empty(0, dtype=torch.int16, device=like.device)
    indices = [run.indices + run.start for run in runs if run.indices is not None]
    values = [run.bits for run in runs if run.bits is not None]
    return torch.cat([nothing.int(), *indices]), torch.cat([nothing, *values])
