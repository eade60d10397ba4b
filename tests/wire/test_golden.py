"""Committed bytes of format version 1: decoded to what they say, and made again bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltasync import dtypes
from deltasync.delta.bits import Flat, Run, integer_dtype, torch_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.delta.host.packing import buckets
from deltasync.delta.shard import whole
from deltasync.store.classes.codec import ClassCodec as ClassCodec  # reads and writes `class`
from deltasync.wire import messages
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.frame import HEADER_BYTES, decode, encode
from deltasync.wire.messages import Bucket, ParameterSpec
from tests.golden import coded, make_golden
from tests.golden.make_golden import BUCKETS, FOLDER, MESSAGES, Row

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
COMMITTED = sorted(path.name for path in FOLDER.iterdir())


def specs_of(parameters: list[Any]) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(tuple(names), tuple(shape), dtypes.BY_CODE[code])
        for names, shape, code in parameters
    )


SPECS, CODED_SPECS = specs_of(make_golden.PARAMETERS), specs_of(coded.PARAMETERS)


def golden(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def bucket(name: str) -> tuple[Bucket, bytes]:
    """(message, payload) of a file, whose header is made again."""
    data = golden(f"bucket-{name}.bin")
    end = HEADER_BYTES + int.from_bytes(data[8:12], "little")
    message, payload_bytes = decode(data[:end])
    assert isinstance(message, Bucket)
    assert payload_bytes == len(data) - end
    assert encode(message, payload_bytes=payload_bytes) == data[:end]
    return message, data[end:]


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def run_of(row: Row) -> tuple[int, Run]:
    parameter, start, span, indices, _, values = row
    dtype = SPECS[parameter].dtype
    raw = np.array(values, f"<u{dtype.item_size}").view(np.uint8)
    bits = torch.from_numpy(raw).view(integer_dtype(dtype))
    places = None if indices is None else torch.tensor(indices, dtype=torch.int32)
    return parameter, Run(start, span, places, bits)


def pack(rows: list[Row]) -> bytes:
    (made,) = buckets(map(run_of, rows), whole(SPECS), bucket_bytes=4096)
    payload = torch.full((made.num_bytes,), 0xEE, dtype=torch.uint8)
    made.write(payload)
    return payload.numpy().tobytes()


def old_weights() -> dict[int, Flat]:
    flats = {}
    for number, spec in enumerate(CODED_SPECS):
        bits = [coded.old(number, n) for n in range(spec.numel)]
        raw = np.array(bits, f"<u{spec.dtype.item_size}").view(np.uint8)
        flats[number] = Flat.of(torch.from_numpy(raw).view(torch_dtype(spec.dtype)))
    return flats


def test_every_kind_of_message_has_a_golden_frame() -> None:
    assert messages.__file__ is not None
    source = Path(messages.__file__).read_text()
    kinds = {message["kind"] for message in MESSAGES.values()} | {"bucket"}
    assert kinds == set(re.findall(r'kind: Literal\["(\w+)"\]', source))
    assert kinds == set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))


def test_the_committed_files_are_what_the_script_makes() -> None:
    made = make_golden.files()
    assert sorted([*made, "digests.json"]) == COMMITTED
    changed = [n for n in made if n not in make_golden.UNSTABLE and made[n] != golden(n)]
    assert changed == []


@pytest.mark.parametrize("name", MESSAGES)
def test_message_decodes_to_its_members_and_encodes_to_its_bytes(name: str) -> None:
    data = golden(f"{name}.bin")
    message, payload_bytes = decode(data)
    members = {key: tuples(value) for key, value in MESSAGES[name].items()}
    assert message.model_dump() == members
    assert payload_bytes == 0
    assert encode(message) == encode(type(message)(**members)) == data


@pytest.mark.parametrize("name", [*BUCKETS, "zstd"])
def test_bucket_decodes_to_its_rows_and_encodes_to_its_bytes(name: str) -> None:
    rows = BUCKETS["dense" if name == "zstd" else name]
    message, payload = bucket(name)
    sent = torch.tensor(list(payload), dtype=torch.uint8)
    found = BucketReader(SPECS).unpack(message, sent)
    for (parameter, run), (expected, right) in zip(found.runs(), map(run_of, rows), strict=True):
        assert (parameter, run.start, run.span) == (expected, right.start, right.span)
        for here, there in ((run.indices, right.indices), (run.bits, right.bits)):
            assert (here is there is None) or torch.equal(here, there)  # type: ignore[arg-type]
    assert pack(rows) == found.payload.numpy().tobytes()


@pytest.mark.parametrize("name", [*coded.CODECS, "gap-zstd"])
def test_coded_bucket_decodes_to_its_rows_and_encodes_to_its_bytes(name: str) -> None:
    message, payload = bucket(f"coded-{name}")
    reader = BucketReader(CODED_SPECS, 1, old_weights())
    found = reader.unpack(message, torch.tensor(list(payload), dtype=torch.uint8))
    raw = found.payload.numpy()
    assert raw.tobytes() == coded.raw_payload()
    if name in coded.MADE:
        old = LiveOld(CODED_SPECS, old_weights())
        made = encode_payload(raw.copy(), message.num_rows, old, IndexCodec[name.upper()])
        assert made.to_bytes(compressed=False) == payload


def test_layout_hash_is_that_of_the_golden_parameters() -> None:
    layout, _ = decode(golden("layout.bin"))
    assert isinstance(layout, messages.Layout)
    assert layout.specs() == SPECS
    assert messages.entries(SPECS) == layout.parameters
    text = make_golden.text_of(MESSAGES["layout"])
    inner = text[len(b'{"parameters":') : text.index(b',"kind"')]
    assert messages.layout_hash(SPECS) == make_golden.sha256(inner)


def test_the_documents_dump_is_the_golden_frame() -> None:
    text = DOCUMENT.read_text()
    found = re.search(r"<!-- smallest-frame -->\n```text\n(.*?)```", text, re.DOTALL)
    assert found is not None
    data = golden("prepare.bin")
    assert found[1] == make_golden.dump(data)
    assert f"with no buckets, {len(data)} bytes" in text
