"""Both ends of a sync without a link: ranks that compare what they hold, an engine that writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Flat, torch_dtype
from deltasync.delta.choice import snapshot_of
from deltasync.delta.coding import Coding, coded
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import ShardSpec, Share, rows_of
from deltasync.delta.snapshot import Bucket, Plan
from deltasync.delta.staging import Staging, staged_bytes_of
from deltasync.delta.tiles import table_of
from deltasync.wire import messages
from deltasync.wire.compression import Compression
from deltasync.wire.messages import ParameterSpec
from tests.worlds.bits import specs_of
from tests.worlds.payloads import POISON, begin_of, measured
from tests.worlds.strategies import Layout, relaid, same_bits

Model = dict[str, Tensor]
Boxes = Mapping[str, ShardSpec]


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

    def __init__(self, specs: Sequence[ParameterSpec], boxes: Boxes, held: Model) -> None:
        self.held = {name: held[name] for name in boxes}
        self.shares: list[Share] = []
        self.readers: list[WireReader] = []
        for number, spec in enumerate(specs):
            for index, region in rows_of(boxes[spec.name]) if spec.name in boxes else ():
                self.shares.append(Share(number, spec, region))
                local = self.held[spec.name][index]
                self.readers.append(WireReader.of(local, spec.dtype, name=spec.name))
        self.snapshot = snapshot_of(self.shares, self.readers, kernels="torch")

    def write(self, held: Model) -> None:
        """The optimizer has changed what this rank holds."""
        for name, tensor in self.held.items():
            Flat.of(tensor).write(0, Flat.of(held[name].contiguous()).read(0, tensor.numel()))

    def delta(self, max_held_bytes: int = 1 << 30, bucket_bytes: int = 1 << 20) -> Plan:
        return self.snapshot.compare(
            self.readers,
            bucket_bytes=bucket_bytes,
            max_held_bytes=max_held_bytes,
            base_version=0,
        )

    def measured(self) -> NDArray[np.uint64]:
        """Digests of what is held, from scratch."""
        return snapshot_of(self.shares, self.readers, kernels="torch").ledger.sums


def sole(model: Model) -> Rank:
    """A trainer of one rank."""
    boxes = {name: ShardSpec.whole(tuple(tensor.shape)) for name, tensor in model.items()}
    return Rank(specs_of(model), boxes, copies(model))


class Receiver:
    """An engine: live weights, and what writes them.

    Args:
        held: Numbers of the parameters that this rank of it holds; None for all.
    """

    def __init__(
        self,
        model: Model,
        *,
        layout: Layout = "stepped",
        held: Collection[int] | None = None,
    ) -> None:
        self.live = copies(model, layout)
        self.specs = specs_of(model)
        self.held = range(len(model)) if held is None else held
        flats = {n: Flat.of(t) for n, t in enumerate(self.live.values()) if n in self.held}
        self.weights = measured(flats, self.specs)

    def expected(self, model: Model) -> NDArray[np.uint64]:
        """The digests that it has if it holds its part of a model."""
        flats = {n: Flat.of(t) for n, t in enumerate(model.values()) if n in self.held}
        return measured(flats, self.specs).ledger.sums

    def measured(self) -> NDArray[np.uint64]:
        """The digests of what is held now."""
        return self.weights.measure(np.arange(self.weights.space.num_chunks))

    def stage(
        self,
        plans: Sequence[Plan],
        *,
        in_place: bool = False,
        coding: Coding = "none",
        bucket_bytes: int = 1 << 20,
        writing: Callable[[], None] = lambda: None,
    ) -> Staging:
        """Bring what ranks send, each on a lane, with as much memory as begin says it takes."""
        sizes = {name: sum(getattr(p, name) for p in plans) for name in ("payload_bytes", "places")}
        reader, most = PayloadReader(self.weights, len(plans)), staged_bytes_of(**sizes)
        reader.begin(begin_of(**sizes))
        staging = Staging(self.weights, max_bytes=most, in_place=in_place, writing=writing)
        for lane, plan in enumerate(plans):
            reader.take_shares(torch.from_numpy(table_of(plan.space)), lane)
            sent = [0, 0]
            for bucket in plan.buckets():
                assert bucket.sizes.num_bytes <= bucket_bytes or bucket.sizes.tiles == 1
                sent = [sent[0] + bucket.sizes.num_bytes, sent[1] + bucket.sizes.places]
                payload, compression = packed(bucket, coding)
                received = reader.read(announced(bucket, compression), payload, lane)
                staging.stage(received)
                payload.fill_(POISON)
                received.changes.memory.fill_(POISON)
            assert sent == [plan.payload_bytes, plan.places]
        return staging

    def sync(self, plans: Sequence[Plan]) -> int:
        """Write what ranks send, for good. Returns the digest of what was read back."""
        staging = self.stage(plans)
        digest = staging.commit()
        self.weights.ledger = staging.ledger
        return digest


def packed(bucket: Bucket, coding: Coding = "none") -> tuple[Tensor, Compression]:
    """A payload as it travels. All of it was written."""
    payload = torch.full((bucket.sizes.num_bytes,), POISON, dtype=torch.uint8)
    made: list[tuple[Tensor, Compression]] = []

    def standing() -> None:
        is_coded = coding != "none"
        made.append(coded(coding, payload, bucket) if is_coded else (payload, "none"))

    bucket.pack(payload, standing)
    [found] = made
    return found


def announced(bucket: Bucket, compression: Compression) -> messages.Bucket:
    return messages.Bucket(version=1, sequence=0, **asdict(bucket.sizes), compression=compression)


def aborted(plan: Plan, after: int) -> None:
    """Pack some buckets of a plan that comes to nothing."""
    for _, bucket in zip(range(after), plan.buckets(), strict=False):
        packed(bucket)


def as_sent(model: Model, specs: Iterable[ParameterSpec]) -> Model:
    """A trainer's weights in the dtypes of an engine."""
    return {
        spec.name: WireReader.of(model[spec.name], spec.dtype, name=spec.name)
        .read(0, spec.numel)
        .clone()
        .view(torch_dtype(spec.dtype))
        .view(spec.shape)
        for spec in specs
    }
