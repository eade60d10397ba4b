"""Both ends of a sync without a link: ranks that compare what they hold, an engine that writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.backend import Applier, Delta, Kernels, Plan, backend_for, snapshot_of
from deltasync.delta.bits import Flat, torch_dtype
from deltasync.delta.bucket import BucketReader, ReadBucket, staged_bytes_of
from deltasync.delta.digests import DigestLedger
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import ShardSpec, Share, rows_of, whole
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import ALIGNMENT, ROW
from tests.worlds.bits import specs_of
from tests.worlds.payloads import POISON
from tests.worlds.strategies import Layout, relaid, same_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POLICY = Policy(chunk_numel=8, dense_above=0.5)
Model = dict[str, Tensor]
Boxes = Mapping[str, ShardSpec]


def device_of(kernels: Kernels) -> torch.device:
    return DEVICE if kernels == "triton" else torch.device("cpu")


def box_of(tensor: Tensor, box: ShardSpec) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))]


def parts(model: Model, boxes: Boxes) -> Model:
    return {name: box_of(model[name], box) for name, box in boxes.items()}


def copies(model: Model, layout: Layout = "contiguous") -> Model:
    return {name: relaid(tensor, layout) for name, tensor in model.items()}


def equal(left: Model, right: Model) -> bool:
    return all(same_bits(left[name].cpu(), right[name].cpu()) for name in left)


class Rank:
    """One of a trainer's ranks: what it holds of a model, and its snapshot."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        boxes: Boxes,
        held: Model,
        kernels: Kernels = "torch",
        policy: Policy = POLICY,
    ) -> None:
        self.policy, self.device = policy, device_of(kernels)
        self.held = {name: held[name].to(self.device) for name in boxes}
        self.shares: list[Share] = []
        self.readers: list[WireReader] = []
        for number, spec in enumerate(specs):
            for index, region in rows_of(boxes[spec.name]) if spec.name in boxes else ():
                self.shares.append(Share(number, spec, region))
                local = self.held[spec.name][index]
                self.readers.append(WireReader.of(local, spec.dtype, name=spec.name))
        self._chunk_numel = policy.chunk_numel_on("cpu")
        self.snapshot = snapshot_of(
            self.shares, self.readers, chunk_numel=self._chunk_numel, kernels=kernels
        )

    def write(self, held: Model) -> None:
        """The optimizer has changed what this rank holds."""
        for name, tensor in self.held.items():
            Flat.of(tensor).write(0, Flat.of(held[name].contiguous()).read(0, tensor.numel()))

    def delta(
        self,
        max_held_bytes: int = 1 << 30,
        bucket_bytes: int = 1 << 20,
        *,
        policy: Policy | None = None,
    ) -> Delta:
        return self.snapshot.compare(
            self.readers,
            policy=policy or self.policy,
            bucket_bytes=bucket_bytes,
            max_held_bytes=max_held_bytes,
            base_version=0,
        )

    def measured(self) -> NDArray[np.uint64]:
        """Digests of what is held, from scratch."""
        fresh = DigestLedger(self.shares, chunk_numel=self._chunk_numel)
        for number, reader in enumerate(self.readers):
            fresh.measure(number, lambda *at, reader=reader: reader.read(*at).cpu())
        return fresh.sums


def digests_of(model: Model, chunk_numel: int, held: Collection[int]) -> DigestLedger:
    """Of some parameters, computed on the host."""
    ledger = DigestLedger(whole(specs_of(model)), chunk_numel=chunk_numel, held=held)
    for number, tensor in enumerate(model.values()):
        if number in held:
            ledger.measure(number, Flat.of(tensor.cpu()).read)
    return ledger


def sole(model: Model, kernels: Kernels = "torch", policy: Policy = POLICY) -> Rank:
    """A trainer of one rank."""
    boxes = {name: ShardSpec.whole(tuple(tensor.shape)) for name, tensor in model.items()}
    return Rank(specs_of(model), boxes, copies(model), kernels, policy)


class Receiver:
    """An engine: live weights, and what writes them.

    Args:
        held: Numbers of the parameters that this rank of it holds; None for all.
        instead: Some of its weights, of any strides.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels = "torch",
        *,
        chunk_numel: int = 5,
        layout: Layout = "stepped",
        held: Collection[int] | None = None,
        instead: Model | None = None,
    ) -> None:
        self.live = {name: relaid(t, layout).to(device_of(kernels)) for name, t in model.items()}
        self.live |= instead or {}
        self.specs = specs_of(model)
        self.held = range(len(model)) if held is None else held
        flats = {n: Flat.of(t) for n, t in enumerate(self.live.values()) if n in self.held}
        ledger = digests_of(self.live, chunk_numel, self.held)
        self.kernels, self._chunk_numel = kernels, chunk_numel
        self.backend = backend_for(flats, ledger, kernels=kernels)

    def measured(self) -> NDArray[np.uint64]:
        """The digests of what is held now, as the back end reads them."""
        return self.backend.measure(np.arange(len(self.backend.ledger.sums)))

    def expected(self, model: Model) -> NDArray[np.uint64]:
        """The digests that it has if it holds its part of a model."""
        return digests_of(model, self._chunk_numel, self.held).sums

    def stage(
        self,
        plans: Sequence[Plan],
        *,
        in_place: bool = False,
        bucket_bytes: int = 1 << 20,
        writing: Callable[[], object] = lambda: None,
    ) -> Applier:
        """Stage what ranks send with as much memory as it takes; in place, with a byte less."""
        sizes = [sum(getattr(p, name) for p in plans) for name in ("sparse_bytes", "dense_bytes")]
        needed = sum(sizes)
        if self.kernels == "torch":
            needed = staged_bytes_of(sparse_bytes=sizes[0], dense_bytes=sizes[1])

        def said() -> None:
            writing()

        staging = self.backend.stage(
            sparse_bytes=sizes[0],
            dense_bytes=sizes[1],
            max_bytes=needed - in_place,
            writing=said,
        )
        assert staging.in_place == in_place
        assert sum(self.bring(plan, staging, bucket_bytes) for plan in plans) <= sum(sizes)
        return staging

    def bring(self, plan: Plan, staging: Applier, bucket_bytes: int = 1 << 20) -> int:
        """Stage payloads, each overwritten once it was taken over. Returns how long blocks are."""
        reader, num_bytes = BucketReader(self.specs), 0
        for bucket in plan.buckets():
            assert bucket.num_bytes <= bucket_bytes
            payload = torch.full(
                (bucket.num_bytes,), POISON, dtype=torch.uint8, device=bucket.device
            )
            bucket.write(payload)
            there = payload.to(device_of(self.kernels))
            opened = reader.open(there, bucket.num_rows)
            num_bytes += used(opened, payload.cpu())
            staging.stage_bucket(opened)
            there.fill_(POISON)
        return num_bytes

    def sync(self, plans: Sequence[Plan], **options: Any) -> int:
        """Write what ranks send, for good. Returns the digest of what was read back."""
        staging = self.stage(plans, **options)
        digest = staging.commit()
        self.backend.ledger = staging.ledger
        return digest


def used(bucket: ReadBucket, payload: Tensor) -> int:
    """Bytes of a bucket's blocks, which are aligned. All between them are 0."""
    padding = payload.clone()
    padding[: len(bucket.rows) * ROW.itemsize] = 0
    for begins, name in ((bucket.index_at, "index_bytes"), (bucket.value_at, "value_bytes")):
        assert not (begins % ALIGNMENT).any()
        for begin, length in zip(begins.tolist(), bucket.rows[name].tolist(), strict=True):
            padding[begin : begin + length] = 0
    assert not padding.any()
    return int((bucket.rows["index_bytes"] + bucket.rows["value_bytes"]).sum())


def aborted(plan: Plan, after: int) -> None:
    """Pack some buckets of a plan that comes to nothing."""
    for _, bucket in zip(range(after), plan.buckets(), strict=False):
        bucket.write(torch.empty(bucket.num_bytes, dtype=torch.uint8, device=bucket.device))


def as_sent(model: Model, specs: Iterable[ParameterSpec]) -> Model:
    """A trainer's weights in the dtypes of an engine."""
    return {
        spec.name: WireReader.of(model[spec.name], spec.dtype, name=spec.name)
        .read(0, spec.numel)
        .view(torch_dtype(spec.dtype))
        .view(spec.shape)
        for spec in specs
    }
