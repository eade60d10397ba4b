"""deltasync's own diff and commit without a session: what a sync calls, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.cases.kernels import ALWAYS_SPARSE, layout_of
from benchmarks.gpu.baselines import Found
from deltasync.delta.backend import Applier, Delta, Kernels, backend_for, snapshot_of
from deltasync.delta.bits import Flat, Run
from deltasync.delta.bucket import BucketReader, ReadBucket
from deltasync.delta.codecs.coding import Coded
from deltasync.delta.digests import DigestLedger
from deltasync.delta.patch import chunk_numel_on
from deltasync.delta.shard import whole
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.compression import Compression
from deltasync.wire.messages import Bucket

BUCKET_BYTES = 256 << 20  # the default of SenderOptions
_SPARSE_BYTES = 6  # of a changed bf16 element


@dataclass(frozen=True, slots=True)
class Sent:
    """A payload as it travels, on the device.

    Attributes:
        data: uint8[n].
        num_rows: Of its table.
        raw_bytes: Length of what it stands for.
        compression: What was done to it.
    """

    data: Tensor
    num_rows: int
    raw_bytes: int
    compression: Compression


class Differ:
    """Compares a module with what it was when this was made: every change sparse.

    Attributes:
        old: What it was, flat.
        changed: How many changes there may be: so many are kept in memory, as in a sync whose
            `max_inflight_bytes` suffice.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        snapshot_device: torch.device | None = None,
        kernels: Kernels = "auto",
    ) -> None:
        specs, self._readers = layout_of(module)
        self.specs = tuple(specs)
        chunk_numel = chunk_numel_on(self._readers[0].flat.line.device.type)
        self._snapshot = snapshot_of(
            whole(specs),
            self._readers,
            chunk_numel=chunk_numel,
            device=snapshot_device,
            kernels=kernels,
        )
        self.old = [f.tensor for f in self._snapshot.flats.values() if isinstance(f, Flat)]
        self.changed = 0
        device = self._readers[0].flat.line.device
        self._payload = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)

    def find(self) -> None:
        """Indices, values and the digests' change, on the device."""
        self._plan()

    def pack(self) -> None:
        """The same, packed into a payload that is used again."""
        for _ in self._payloads():
            pass

    def code(self) -> list[Sent]:
        """The same, and each payload coded in blocks where it is."""
        return [self._coded(encode(), payload, rows) for encode, payload, rows in self._each()]

    def encoders(self) -> list[Callable[[], Coded | None]]:
        """What codes each payload, again and again; the payloads are kept."""
        return [encode for encode, _, _ in self._each(keep=True)]

    def _each(
        self, *, keep: bool = False
    ) -> Iterator[tuple[Callable[[], Coded | None], Tensor, int]]:
        """(what codes it, payload, rows) of every bucket."""
        for bucket in self._plan().buckets():
            room = self._payload[: bucket.num_bytes]
            payload = torch.empty_like(room) if keep else room
            encode = bucket.encoder(IndexCodec.BLOCK)
            if encode is None:
                raise RuntimeError("no blocks are coded where the weights are")
            bucket.write(payload)
            yield partial(encode, payload), payload, bucket.num_rows

    def _coded(self, coded: Coded | None, payload: Tensor, num_rows: int) -> Sent:
        data = payload.clone() if coded is None else coded.data
        return Sent(data, num_rows, len(payload), "none" if coded is None else "coded")

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

    def buckets(self) -> list[Sent]:
        """Every bucket, as it is."""
        return [
            Sent(payload.clone(), num_rows, len(payload), "none")
            for payload, num_rows in self._payloads()
        ]

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


class Stager:
    """Stages the same buckets onto `target` and commits them, again and again."""

    def __init__(
        self,
        differ: Differ,
        target: Sequence[Tensor],
        buckets: list[Sent],
        *,
        kernels: Kernels = "auto",
    ) -> None:
        self._buckets = buckets
        flats = {number: Flat.of(tensor) for number, tensor in enumerate(target)}
        chunk_numel = chunk_numel_on(target[0].device.type)
        ledger = DigestLedger(whole(differ.specs), chunk_numel=chunk_numel)
        self._backend = backend_for(flats, ledger, kernels=kernels)
        self._reader = BucketReader(differ.specs, 1, flats, self._backend.decoder)
        self._applier: Applier | None = None

    def stage(self) -> None:
        """Everything up to the decision."""
        num_bytes = sum(bucket.raw_bytes for bucket in self._buckets)
        self._applier = self._backend.stage(
            sparse_bytes=num_bytes, dense_bytes=0, max_bytes=1 << 62, writing=lambda: None
        )
        for bucket in self.open():
            self._applier.stage_bucket(bucket)
        _ = self._applier.ledger

    def open(self) -> Iterator[ReadBucket]:
        """What arrives, taken apart; decoded, if it is coded."""
        self._reader.begin()
        for number, bucket in enumerate(self._buckets):
            message = Bucket(
                version=1,
                sequence=number,
                num_rows=bucket.num_rows,
                raw_bytes=bucket.raw_bytes,
                compression=bucket.compression,
            )
            yield self._reader.unpack(message, bucket.data)

    def commit(self) -> None:
        """The pause: write, read back, digest."""
        applier = self._applier
        assert applier is not None
        if applier.commit() != applier.ledger.total:
            raise RuntimeError("the weights read back are not those that were written")

    def undo(self) -> None:
        """Put back what the last commit replaced, if there was one."""
        if self._applier is not None:
            self._applier.undo()


def _joined(runs: list[Run], like: Tensor) -> tuple[Tensor, Tensor]:
    """The runs of one parameter as (int32 indices, int16 values)."""
    nothing = torch.empty(0, dtype=torch.int16, device=like.device)
    indices = [run.indices + run.start for run in runs if run.indices is not None]
    values = [run.bits for run in runs if run.bits is not None]
    return torch.cat([nothing.int(), *indices]), torch.cat([nothing, *values])
