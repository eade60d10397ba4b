"""Compiling kernels before they are needed: a first sync that compiles would pause an engine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from deltasync.delta.batched.backend import BatchedBackend
from deltasync.delta.batched.staging import BatchedStaging
from deltasync.delta.batched.weights import device_of
from deltasync.delta.bits import Flat, Live, torch_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codes import Codes
from deltasync.delta.digests import DigestLedger
from deltasync.delta.policy import Policy
from deltasync.delta.readers import Kind, Reader, WireReader
from deltasync.delta.region import Region
from deltasync.delta.route import Piece
from deltasync.delta.shard import Share, whole
from deltasync.dtypes import Dtype
from deltasync.wire.messages import ParameterSpec

_NUMEL, _COLS = 64, 16
_BUCKET_BYTES = 1 << 16


@lru_cache
def warm_up(
    formats: frozenset[tuple[Dtype, Dtype]],
    chunk_numel: int,
    device: torch.device,
    *,
    computed: frozenset[Kind] = frozenset(),
    box_dims: int = 0,
    has_codes: bool = False,
    has_gaps: bool = False,
) -> None:
    """`sync_tiny_models`, once in a process and where there is something to compile.

    Triton keeps what it compiles on disk.
    """
    if device.type == "cuda":
        for dims in {0, box_dims}:
            for codes in {False, has_codes and dims > 0}:
                sync_tiny_models(
                    formats,
                    chunk_numel,
                    device,
                    computed=computed,
                    box_dims=dims,
                    has_codes=codes,
                    has_gaps=has_gaps,
                )


def sync_tiny_models(
    formats: frozenset[tuple[Dtype, Dtype]],
    chunk_numel: int,
    device: torch.device,
    *,
    computed: frozenset[Kind] = frozenset(),
    box_dims: int = 0,
    has_codes: bool = False,
    has_gaps: bool = False,
) -> None:
    """Sync in every way there is, which launches every kernel that a sync may need.

    Args:
        formats: (dtype of the source, wire dtype) of the parameters to come.
        chunk_numel: Elements of a chunk.
        device: Where kernels run.
        computed: Kinds of what kernels compute.
        box_dims: Dimensions of the boxes that receivers hold weights in; 0 for weights in one run.
        has_codes: Whether receivers hold integers as codes of 4 bits, spread over words.
        has_gaps: Whether what is compared are shares with gaps.
    """
    with device_of(device):
        pairs = sorted(formats, key=lambda pair: (pair[0].name, pair[1].name))
        readers: list[Reader] = [
            WireReader.of(_filled(own, device), wire, name=own.name) for own, wire in pairs
        ]
        readers += [kind.example(device) for kind in sorted(computed, key=str)]
        specs = tuple(
            ParameterSpec((f"{number}",), (2 * _NUMEL,), reader.dtype)
            for number, reader in enumerate(readers)
        )
        rows = (_NUMEL // _COLS, 2 * _COLS), (_COLS, 1)
        region = Region(0, rows) if has_gaps else Region.run(0, _NUMEL)
        shares = [Share(number, spec, region) for number, spec in enumerate(specs)]
        for dense_above in (1.0, 0.0):
            for max_held_bytes in (_BUCKET_BYTES, 0):
                policy = Policy(dense_above=dense_above, chunk_numel=chunk_numel)
                _sync(specs, shares, readers, policy, device, max_held_bytes, box_dims, has_codes)


def _live(share: Share, device: torch.device, dims: int, has_codes: bool) -> Live:
    """Weights in one run, or in a box of so many dimensions, the first of them the innermost.

    With `has_codes` that is a box of codes, if the weights are integers.
    """
    numel = share.numel
    storage = torch.zeros(2 * numel, dtype=torch_dtype(share.spec.dtype), device=device)
    if not dims:
        return Flat.of(storage[:numel])
    twos = min(dims, numel.bit_length() - 1) - 1
    shape = *[2] * twos, numel >> twos
    box = storage.as_strided(shape, [2 << nth for nth in range(len(shape))])
    if not has_codes or share.spec.dtype.is_floating:
        return Flat.of(box)
    count = 2 * share.spec.dtype.item_size
    elements, places = Region.run(0, numel), Region.of(box)
    target = Region(0, tuple((size, step * count) for size, step in places.dims))
    pieces = [Piece("", elements, replace(target, start=code), code) for code in range(count)]
    return Codes(pieces, {"": storage}, share.spec.dtype, numel)


def _filled(dtype: Dtype, device: torch.device) -> Tensor:
    data = torch.full((_NUMEL * dtype.item_size,), 1, dtype=torch.uint8, device=device)
    return data.view(torch_dtype(dtype))


def _sync(
    specs: tuple[ParameterSpec, ...],
    shares: list[Share],
    readers: list[Reader],
    policy: Policy,
    device: torch.device,
    max_held_bytes: int,
    box_dims: int,
    has_codes: bool,
) -> None:
    sent, ledger = (
        DigestLedger(own, chunk_numel=policy.chunk_numel_on(device.type))
        for own in (shares, whole(specs))
    )
    snapshot, replica, other = (
        BatchedBackend(
            {
                number: _live(share, device, dims, has_codes)
                for number, share in enumerate(own.shares)
            },
            own,
            device,
        )
        for own, dims in ((sent, 0), (ledger, box_dims), (ledger, box_dims))
    )
    for backend in (snapshot, replica):
        backend.ledger.sums[:] = backend.weights.digests()
    delta = snapshot.compare(
        readers,
        policy=policy,
        bucket_bytes=_BUCKET_BYTES,
        max_held_bytes=max_held_bytes,
        base_version=0,
    )
    staged = BatchedStaging(replica.weights, ledger)
    in_place = BatchedStaging(other.weights, ledger, in_place=True)
    reader = BucketReader(specs)
    for bucket in delta.buckets():
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        bucket.write(payload)
        opened = reader.open(payload, bucket.num_rows)
        staged.stage_bucket(opened)
        in_place.stage_bucket(opened)
    delta.decided()
    for full in snapshot.full(bucket_bytes=_BUCKET_BYTES).buckets():
        full.write(torch.empty(full.num_bytes, dtype=torch.uint8, device=device))
    staged.commit()
    staged.undo()
