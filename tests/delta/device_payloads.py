"""Payloads coded and decoded where weights lie, beside what the host makes of the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.decoding import DeviceDecoder
from deltasync.delta.batched.encoding import Packed, encode
from deltasync.delta.batched.weights import BatchedWeights
from deltasync.delta.bits import Flat, Live, Run, torch_dtype
from deltasync.delta.codecs.coding import Coded
from deltasync.delta.codecs.decoding import decode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.delta.codes import Codes
from deltasync.delta.digests import DigestLedger
from deltasync.delta.region import Region
from deltasync.delta.route import Piece
from deltasync.delta.shard import Share, whole
from deltasync.dtypes import BY_NAME
from deltasync.errors import SyncError, WireError
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import ROW, RowKind, Rows
from tests.worlds.bits import random_bits
from tests.worlds.payloads import payloads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Flats = dict[int, Live]
Runs = list[tuple[int, Run]]
Specs = tuple[ParameterSpec, ...]


@dataclass(frozen=True)
class Change:
    """What changes, in a payload that is not coded.

    Attributes:
        specs, flats: The weights before.
        runs: What changes.
        payload: uint8[n], on the device.
        num_rows: Of its table.
    """

    specs: Specs
    flats: Flats
    runs: Runs
    payload: Tensor
    num_rows: int

    @property
    def raw(self) -> bytes:
        return self.payload.cpu().numpy().tobytes()


def change_of(specs: Specs, runs: Runs, seed: int, device: torch.device | str = DEVICE) -> Change:
    [(payload, num_rows)] = payloads(runs, specs)
    return Change(specs, flats_of(specs, seed, device), runs, payload.to(device), num_rows)


def flats_of(specs: Specs, seed: int, device: torch.device | str = DEVICE) -> Flats:
    """The same old weights at both ends."""
    rng = np.random.default_rng(seed)
    return {
        n: Flat.of(random_bits(s.dtype, s.numel, rng).view(torch_dtype(s.dtype)).to(device))
        for n, s in enumerate(specs)
    }


def near(specs: Specs, densities: list[float], seed: int) -> Runs:
    """A run of each parameter, whose values moved by a few steps: dense at density 1, else sparse.

    At a density of 0 there is one change, to random bits.
    """
    rng, runs = np.random.default_rng(seed), list[tuple[int, Run]]()
    for number, (flat, density) in enumerate(
        zip(flats_of(specs, seed).values(), densities, strict=True)
    ):
        start = int(rng.integers(0, max(1, flat.numel // 8)))
        span = flat.numel - start
        old = flat.line.cpu().numpy()[start:]
        if density == 1:
            runs.append((number, Run(start, span, None, torch.from_numpy(old + old.dtype.type(1)))))
            continue
        count = max(1, int(span * density))
        where = np.sort(rng.choice(span, count, replace=False)).astype(np.int32)
        steps = rng.choice(np.array([-20, -2, -1, 1, 1, 2, 9, 300]), count)
        new = (old[where].astype(np.int64) + steps).astype(old.dtype)
        if not density:
            new = random_bits(specs[number].dtype, 1, rng).numpy()
        runs.append((number, Run(start, span, torch.from_numpy(where), torch.from_numpy(new))))
    return runs


def weights_of(specs: Specs, flats: Mapping[int, Live]) -> BatchedWeights:
    ledger = DigestLedger(whole(specs), chunk_numel=1 << 20, held=flats.keys())
    return BatchedWeights(flats, ledger, DEVICE)


def rows_in(payload: Tensor, num_rows: int) -> Rows:
    return payload.cpu().numpy()[: num_rows * ROW.itemsize].view(ROW)


def on_device(change: Change) -> Coded | None:
    """The coded form that the device makes."""
    rows = rows_in(change.payload, change.num_rows)
    packed = Packed(
        payload=change.payload,
        rows=rows,
        weights=weights_of(change.specs, change.flats),
        number=rows["parameter"].astype(np.int64),
        start=rows["start"].astype(np.int64),
        is_known=rows["kind"] == RowKind.SPARSE,
    )
    return encode(packed)


def sizes(specs: Specs) -> dict[str, NDArray[np.uint64]]:
    return {
        "numels": np.array([s.numel for s in specs], np.uint64),
        "item_sizes": np.array([s.dtype.item_size for s in specs], np.uint64),
    }


def by_host(
    data: bytes, num_rows: int, raw_bytes: int, specs: Specs, flats: Mapping[int, Live]
) -> bytes | Exception:
    """The payload that the host decodes, or why it refuses."""
    try:
        old = LiveOld(specs, flats)
        found = decode_payload(memoryview(data), num_rows, raw_bytes, old, **sizes(specs))
    except (WireError, SyncError) as error:
        return error
    return found.tobytes()


def by_device(
    data: bytes, num_rows: int, raw_bytes: int, specs: Specs, flats: Mapping[int, Live]
) -> bytes | Exception | None:
    """The same on the device; None if that leaves it to the host."""
    decoder = DeviceDecoder(weights_of(specs, flats), flats)
    sent = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(DEVICE)
    try:
        found = decoder.decode(sent, num_rows, raw_bytes, **sizes(specs), after=(0, 0))
    except (WireError, SyncError) as error:
        return error
    return None if found is None else found.payload.cpu().numpy().tobytes()


def decoded_alike(
    data: bytes, num_rows: int, raw_bytes: int, specs: Specs, flats: Mapping[int, Live]
) -> Any:
    """What both make of the same bytes: the same payload, or a refusal of each."""
    host = by_host(data, num_rows, raw_bytes, specs, flats)
    device = by_device(data, num_rows, raw_bytes, specs, flats)
    if device is not None:
        assert isinstance(host, Exception) == isinstance(device, Exception), (host, device)
        if not isinstance(host, Exception):
            assert host == device
    return device


def specs_of(*parameters: tuple[Any, int]) -> Specs:
    return tuple(
        ParameterSpec((f"w{n}",), (numel,), dtype) for n, (dtype, numel) in enumerate(parameters)
    )


def use_every_kernel() -> None:
    """Code and decode in each way that kernels are compiled for."""
    kinds = [("bfloat16", 0.05), ("float32", 0.05), ("uint8", 1.0), ("float64", 0.1), ("int8", 0.3)]
    specs = specs_of(*((BY_NAME[name], 1001 + 2 * n) for n, (name, _) in enumerate(kinds)))
    change = change_of(specs, near(specs, [density for _, density in kinds], 1), 1)
    data = on_device(change)
    assert data is not None
    sent = data.data.cpu().numpy().tobytes(), change.num_rows, len(change.payload)
    for flats in (change.flats, strided(change.flats), spread(change.flats)):
        assert by_device(*sent, specs, flats) == change.raw
    shard = Region(0, ((50, 40), (20, 1)))  # every other 20 of 2000 elements
    spec = ParameterSpec(("w",), (2000,), BY_NAME["bfloat16"])
    flat = Flat.of(torch.zeros(1000, dtype=torch.bfloat16, device=DEVICE))
    ledger = DigestLedger([Share(0, spec, shard)], chunk_numel=1 << 20)
    indices = shard.places(torch.arange(0, 1000, 5)).int()
    run = Run(0, 2000, indices, torch.ones(len(indices), dtype=torch.int16))
    there = change_of((spec,), [(0, run)], 0)
    rows = rows_in(there.payload, 1)
    weights, zeros = BatchedWeights({0: flat}, ledger, DEVICE), np.zeros(1, np.int64)
    packed = Packed(there.payload, rows, weights, zeros, zeros, np.ones(1, np.bool_))
    assert encode(packed) is not None


def strided(flats: Flats) -> Flats:
    """The same weights, every other element of storage."""
    found: Flats = {}
    for number, flat in flats.items():
        storage = torch.zeros(2 * flat.numel, dtype=torch_dtype(flat.dtype), device=DEVICE)
        found[number] = Flat.of(storage[::2])
        found[number].write(0, flat.read(0, flat.numel))
    return found


def spread(flats: Flats) -> Flats:
    """The same, and integers as codes of 4 bits: all first ones, then all second ones."""
    found: Flats = {}
    for number, flat in strided(flats).items():
        if flat.dtype.is_floating:
            found[number] = flat
            continue
        count, elements = 2 * flat.dtype.item_size, Region.run(0, flat.numel)
        pieces = [
            Piece("", elements, Region.run(code * flat.numel, flat.numel), code)
            for code in range(count)
        ]
        storage = torch.zeros(-(-flat.numel // 4) * 4, dtype=torch.uint8, device=DEVICE)
        found[number] = Codes(pieces, {"": storage}, flat.dtype, flat.numel)
        found[number].write(0, flat.read(0, flat.numel))
    return found
