"""Committed bytes of coded payloads: decoded by the old weights, and made again bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltasync import dtypes
from deltasync.delta.bits import Flat, torch_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codecs.decoding import decode_payload
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.wire.codecs import DENSE_CODECS, SPARSE_CODECS, IndexCodec
from deltasync.wire.frame import HEADER_BYTES, decode, encode
from deltasync.wire.messages import Bucket, ParameterSpec
from tests.golden import coded
from tests.golden.make_golden import FOLDER

SPECS = tuple(
    ParameterSpec(tuple(names), tuple(shape), dtypes.BY_CODE[code])
    for names, shape, code in coded.PARAMETERS
)
FILES = (*coded.CODECS, "gap-zstd")


def old_weights() -> LiveOld:
    flats = {}
    for number, spec in enumerate(SPECS):
        bits = [coded.old(number, n) for n in range(spec.numel)]
        raw = np.array(bits, f"<u{spec.dtype.item_size}").view(np.uint8)
        flats[number] = Flat.of(torch.from_numpy(raw).view(torch_dtype(spec.dtype)))
    return LiveOld(SPECS, flats)


def golden(name: str) -> tuple[Bucket, bytes]:
    """(message, payload) of a file, whose header is made again."""
    data = (FOLDER / f"bucket-coded-{name}.bin").read_bytes()
    end = HEADER_BYTES + int.from_bytes(data[8:12], "little")
    message, payload_bytes = decode(data[:end])
    assert isinstance(message, Bucket)
    assert message.compression == "coded"
    assert payload_bytes == len(data) - end
    assert encode(message, payload_bytes=payload_bytes) == data[:end]
    return message, data[end:]


@pytest.mark.parametrize("name", FILES)
def test_coded_bucket_decodes_to_its_rows(name: str) -> None:
    message, payload = golden(name)
    raw = decode_payload(
        memoryview(payload),
        message.num_rows,
        message.raw_bytes,
        old_weights(),
        numels=np.array([spec.numel for spec in SPECS], np.uint64),
        item_sizes=np.array([spec.dtype.item_size for spec in SPECS], np.uint64),
    )
    assert raw.tobytes() == coded.raw_payload()
    found = BucketReader(SPECS).read(torch.from_numpy(raw), message.num_rows)
    for (parameter, run), row in zip(found, coded.ROWS, strict=True):
        assert (parameter, run.start, run.span) == (row.parameter, row.start, row.span)
        assert run.bits is not None
        width = f"<u{SPECS[parameter].dtype.item_size}"
        assert tuple(run.bits.numpy().view(width).tolist()) == row.new
        indices = None if run.indices is None else tuple(run.indices.tolist())
        assert indices == row.indices


@pytest.mark.parametrize("name", coded.MADE)
def test_rows_encode_to_the_bytes(name: str) -> None:
    message, payload = golden(name)
    raw = np.frombuffer(coded.raw_payload(), np.uint8).copy()
    made = encode_payload(raw, message.num_rows, old_weights(), IndexCodec[name.upper()])
    assert made.to_bytes(compressed=False) == payload


def test_the_files_have_every_pair_of_codecs() -> None:
    pairs = {coded.CODECS[name](row)[:2] for name in coded.CODECS for row in coded.ROWS}
    assert pairs == {*SPARSE_CODECS, *DENSE_CODECS}
