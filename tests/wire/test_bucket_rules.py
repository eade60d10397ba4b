"""Rules W10 to W18 of docs/wire-format.md: what breaks one raises the error that fits."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltasync import dtypes
from deltasync.delta.bits import Run
from deltasync.delta.bucket import BucketReader
from deltasync.delta.diff import apply_patch
from deltasync.delta.digests import digest_text
from deltasync.delta.patch import SparsePatch, check_indices
from deltasync.errors import (
    InvalidIndices,
    InvalidTable,
    ProtocolViolation,
    TruncatedFrame,
    UnknownCodec,
)
from deltasync.sync.protocol.receiver_session import ReceiverSession, ReceiverState
from deltasync.wire import messages as m
from deltasync.wire.digest import seed
from deltasync.wire.frame import decode
from deltasync.wire.table import ROW
from tests.golden.make_golden import FOLDER
from tests.wire import reference
from tests.wire.digests import digest_at
from tests.wire.raises import exactly

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "wire-format.md"
SPECS = (
    m.ParameterSpec(("a",), (10, 10), dtypes.BY_NAME["bfloat16"]),
    m.ParameterSpec(("b",), (2**32,), dtypes.BY_NAME["float64"]),
    m.ParameterSpec(("c",), (0,), dtypes.BY_NAME["float32"]),
)
FIELDS = ROW.names or ()
GOOD = {
    "parameter": 0,
    "kind": 1,
    "index_codec": 1,
    "value_codec": 1,
    "reserved": 0,
    "start": 10,
    "span": 50,
    "count": 2,
    "index_bytes": 8,
    "value_bytes": 4,
}
DENSE = {"kind": 2, "index_codec": 0, "span": 4, "count": 4, "index_bytes": 0, "value_bytes": 8}


def payload_of(*changes: dict[str, int]) -> bytes:
    """A payload of rows that differ from GOOD by `changes`, with blocks of the lengths they say."""
    rows = [GOOD | change for change in changes]
    blocks = [(bytes(r["index_bytes"]), bytes(r["value_bytes"])) for r in rows]
    return reference.payload([tuple(r[f] for f in FIELDS) for r in rows], blocks)


def read(payload: bytes, num_rows: int, reader: BucketReader | None = None) -> list[Any]:
    tensor = torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8).copy())
    return (reader or BucketReader(SPECS)).read(tensor, num_rows)


def lying(**changes: int) -> bytes:
    """The payload of the good row, of which the table says otherwise."""
    row = GOOD | changes
    table = reference.ROW.pack(*(row[field] for field in FIELDS))
    return table + payload_of({})[ROW.itemsize :]


# Section 3: the bucket's payload


def test_a_good_payload_is_read() -> None:
    ((parameter, run),) = read(payload_of({}), 1)
    assert (parameter, run.start, run.span, run.count) == (0, 10, 50, 2)


@pytest.mark.parametrize("size", [0, 1, 47, 49, 95])
def test_w10_payload_shorter_than_its_table(size: int) -> None:
    with exactly(TruncatedFrame):
        read((payload_of({}) * 2)[:size], 2)


@pytest.mark.parametrize("num_rows", [2, 3, 100, 2**32 - 1])
def test_w10_more_rows_than_the_payload_has(num_rows: int) -> None:
    with exactly(TruncatedFrame):
        read(payload_of({}), num_rows)


@pytest.mark.parametrize("change", [-5, -1, 1, 4, 8])
def test_w10_payload_of_another_length_than_its_blocks(change: int) -> None:
    with exactly(TruncatedFrame):
        read((payload_of({}) + bytes(8))[: len(payload_of({})) + change], 1)


def test_w10_padding_is_not_looked_at() -> None:
    data = bytearray(payload_of({"value_bytes": 4}, {"start": 60, "span": 40}))
    assert data[-8 - 4 - 4 : -8 - 4] == bytes(4)
    data[-8 - 4 - 4 : -8 - 4] = b"\xff" * 4
    assert len(read(bytes(data), 2)) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"parameter": 3},
        {"parameter": 2**32 - 1},
        {"kind": 0},
        {"kind": 3},
        {"kind": 255},
        {"reserved": 1},
        {"reserved": 255},
    ],
)
def test_w11_parameter_kind_and_reserved(changes: dict[str, int]) -> None:
    with exactly(InvalidTable):
        read(lying(**changes), 1)


@pytest.mark.parametrize(
    "changes",
    [
        *({"index_codec": code} for code in (0, 2, 3, 4, 255)),
        *({"value_codec": code} for code in (0, 2, 3, 255)),
        DENSE | {"index_codec": 1},
    ],
)
def test_w11_codecs(changes: dict[str, int]) -> None:
    with exactly(UnknownCodec):
        read(lying(**changes), 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 51},
        {"start": 100},
        {"start": 2**64 - 1},
        {"start": 2**64 - 50},
        {"span": 91},
        {"span": 2**64 - 1},
        {"span": 2**64 - 10},
        {"span": 0},
        {"count": 0},
        {"count": 51},
        {"count": 2**64 - 1},
        {"parameter": 2, "start": 0, "span": 1},
        {"parameter": 2, "start": 0, "span": 0},
        DENSE | {"count": 3, "value_bytes": 6},
        DENSE | {"span": 3},
    ],
)
def test_w12_bounds(changes: dict[str, int]) -> None:
    with exactly(InvalidTable):
        read(lying(**changes), 1)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"count": 0, "index_bytes": 0, "value_bytes": 0}, "count"),
        ({"span": 1}, "count"),
        ({"parameter": 1, "span": 2**31, "value_bytes": 16}, "2\\^31"),
        (DENSE | {"span": 5}, "dense"),
        (DENSE | {"start": 97}, "start"),
        ({"start": 2**64 - 10}, "start"),
    ],
)
def test_w12_bounds_alone_are_broken(changes: dict[str, int], rule: str) -> None:
    with pytest.raises(InvalidTable, match=rule):
        read(payload_of(changes, {"parameter": 1, "value_bytes": 16}), 2)


def test_w12_widest_rows_that_can_be() -> None:
    assert read(payload_of({"start": 50}), 1)
    assert read(payload_of({"start": 0, "span": 100}), 1)
    wide = {"parameter": 1, "start": 2**32 - 2**31 + 1, "span": 2**31 - 1, "value_bytes": 16}
    assert read(payload_of(wide), 1)
    assert read(payload_of(DENSE | {"start": 96}), 1)


LOW, HIGH = {"start": 0, "span": 10}, {"start": 10, "span": 10}
OTHER = {"parameter": 1, "start": 0, "value_bytes": 16}


DISORDERED = [(HIGH, LOW), (LOW, LOW), (LOW, HIGH | {"start": 9}), (OTHER, LOW)]


@pytest.mark.parametrize("rows", DISORDERED)
def test_w13_rows_of_a_bucket_out_of_order(rows: tuple[dict[str, int], ...]) -> None:
    with exactly(InvalidTable):
        read(payload_of(*rows), 2)


@pytest.mark.parametrize("rows", DISORDERED)
def test_w13_rows_of_two_buckets_out_of_order(rows: tuple[dict[str, int], ...]) -> None:
    reader = BucketReader(SPECS)
    read(payload_of(rows[0]), 1, reader)
    with exactly(InvalidTable):
        read(payload_of(rows[1]), 1, reader)


def test_w13_a_new_sync_begins_at_the_first_parameter() -> None:
    reader = BucketReader(SPECS)
    for row in (LOW, HIGH, OTHER):
        assert read(payload_of(row), 1, reader)
    reader.begin()
    assert read(payload_of(LOW), 1, reader)


@pytest.mark.parametrize("indices", [[1, 1], [2, 1], [-1, 1], [0, 50], [0, 2**31 - 1], [-5, -4]])
def test_w14_indices(indices: list[int]) -> None:
    block = struct.pack("<2i", *indices)
    data = payload_of({})
    ((_, run),) = read(data[: ROW.itemsize] + block + data[ROW.itemsize + 8 :], 1)
    with exactly(InvalidIndices):
        check_indices(run, name="a")


def test_w14_outermost_indices() -> None:
    check_indices(Run(10, 50, torch.tensor([0, 49], dtype=torch.int32)), name="a")


def test_w15_applying_twice_equals_once() -> None:
    weight = torch.arange(6, dtype=torch.float32)
    patch = SparsePatch(
        name="w",
        shape=(6,),
        indices=torch.tensor([1, 4], dtype=torch.int32),
        values=torch.tensor([-0.0, 7.5]),
    )
    apply_patch(weight, patch)
    expected = torch.tensor([0.0, -0.0, 2.0, 3.0, 7.5, 5.0]).view(torch.int32)
    assert torch.equal(weight.view(torch.int32), expected)
    apply_patch(weight, patch)
    assert torch.equal(weight.view(torch.int32), expected)


def staging() -> ReceiverSession:
    session = ReceiverSession("e")
    session.on("greeted")
    layout, welcome, begin = (
        decode((FOLDER / f"{name}.bin").read_bytes())[0] for name in ("layout", "welcome", "begin")
    )
    assert isinstance(layout, m.Layout)
    session.on(layout.model_copy(update={"version": 7}))
    session.on(welcome)
    session.on(begin.model_copy(update={"layout_hash": layout.hash}))
    return session


def bucket(sequence: int) -> m.Bucket:
    return m.Bucket(version=8, sequence=sequence, num_rows=1, raw_bytes=64, compression="none")


@pytest.mark.parametrize("sequences", [[1], [0, 0], [0, 2], [0, 1, 0]])
def test_w16_buckets_out_of_sequence(sequences: list[int]) -> None:
    session = staging()
    for sequence in sequences[:-1]:
        session.on(bucket(sequence))
    with exactly(ProtocolViolation):
        session.on(bucket(sequences[-1]))


@pytest.mark.parametrize("num_buckets", [0, 1, 3])
def test_w16_another_number_of_buckets_than_prepare_says(num_buckets: int) -> None:
    session = staging()
    for sequence in (0, 1):
        session.on(bucket(sequence))
    with exactly(ProtocolViolation):
        session.on(m.Prepare(version=8, num_buckets=num_buckets))
    session.on(m.Prepare(version=8, num_buckets=2))
    assert session.state is ReceiverState.PREPARED


# Section 4: codecs


@pytest.mark.parametrize(
    "changes",
    [
        *({"index_bytes": size} for size in (0, 4, 12, 2**32 + 8, 2**64 - 8)),
        *({"value_bytes": size} for size in (0, 2, 6, 8, 2**32 + 4, 2**64 - 4)),
        {"count": 3},
        {"index_bytes": 4, "value_bytes": 8},
        DENSE | {"index_bytes": 8},
        DENSE | {"value_bytes": 4},
        {"parameter": 1, "span": 2**30, "count": 2**30, "index_bytes": 2**32},
        DENSE | {"parameter": 1, "start": 0, "span": 2**32, "count": 2**32, "value_bytes": 2**35},
    ],
)
def test_w17_lengths(changes: dict[str, int]) -> None:
    with exactly(InvalidTable):
        read(lying(**changes), 1)


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=lambda dtype: dtype.name)
def test_w17_value_bytes_follow_the_item_size(dtype: dtypes.Dtype) -> None:
    reader = BucketReader((m.ParameterSpec(("a",), (100,), dtype),))
    for size in (1, 2, 4, 8):
        payload = payload_of({"value_bytes": 2 * size})
        if size == dtype.item_size:
            assert read(payload, 1, reader)
            reader.begin()
        else:
            with exactly(InvalidTable):
                read(payload, 1, reader)


# Section 5: the state digest

VECTORS = json.loads((FOLDER / "digests.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["elements"])
def test_w18_element_vectors(vector: dict[str, Any]) -> None:
    bits = np.array([int(b, 16) for b in vector["bits"]], f"u{vector['item_size']}")
    positions = np.array([int(p, 16) for p in vector["positions"]], np.int64)
    found = digest_at(positions, bits, key=seed(vector["name"]))
    assert digest_text(found) == vector["digest"]


def test_w18_seeds() -> None:
    assert {name: digest_text(seed(name)) for name in VECTORS["seeds"]} == VECTORS["seeds"]


# The document and this folder


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    rules = re.findall(r"^- \*\*W(\d+)\*\*", DOCUMENT.read_text(), re.MULTILINE)
    paths = (path for folder in (HERE, HERE.parent / "delta") for path in folder.glob("test_*.py"))
    names = (
        name
        for path in paths
        for name in re.findall(r"^def test((?:_w\d\d)+)_", path.read_text(), re.MULTILINE)
    )
    tests = {int(number) for name in names for number in re.findall(r"\d\d", name)}
    assert sorted(map(int, rules)) == sorted(tests) == list(range(1, len(rules) + 1))
