"""Committed bytes of format version 1: decoded to what they say, and made again bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltasync import dtypes
from deltasync.delta.bits import Run, integer_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.digests import digest_text
from deltasync.delta.host.packing import buckets
from deltasync.delta.shard import whole
from deltasync.wire import messages
from deltasync.wire.compression import decompress
from deltasync.wire.digest import seed as seed_of
from deltasync.wire.frame import HEADER_BYTES, decode, encode
from deltasync.wire.messages import Bucket, ParameterSpec
from tests.golden import make_golden
from tests.golden.make_golden import BUCKETS, DENSE, FOLDER, MESSAGES, Row
from tests.wire.digests import digest_run

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
COMMITTED = sorted(path.name for path in FOLDER.iterdir())
SPECS = tuple(
    ParameterSpec(tuple(names), tuple(shape), dtypes.BY_CODE[code])
    for names, shape, code in make_golden.PARAMETERS
)


def golden(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def split(frame: bytes) -> tuple[bytes, bytes]:
    end = HEADER_BYTES + int.from_bytes(frame[8:12], "little")
    return frame[:end], frame[end:]


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def run_of(row: Row) -> tuple[int, Run]:
    parameter, start, span, indices, _, values = row
    dtype = SPECS[parameter].dtype
    raw = np.array(values, f"<u{dtype.item_size}").view(np.uint8)
    bits = torch.from_numpy(raw).view(integer_dtype(dtype))
    places = None if indices is None else torch.tensor(indices, dtype=torch.int32)
    return parameter, Run(start, span, places, bits)


def as_lists(runs: list[tuple[int, Run]]) -> list[tuple[Any, ...]]:
    found = []
    for parameter, run in runs:
        assert run.bits is not None
        indices = None if run.indices is None else run.indices.tolist()
        found.append((parameter, run.start, run.span, indices, run.bits.tolist()))
    return found


def pack(rows: list[Row]) -> bytes:
    (bucket,) = buckets(map(run_of, rows), whole(SPECS), bucket_bytes=4096)
    payload = torch.full((bucket.num_bytes,), 0xEE, dtype=torch.uint8)
    bucket.write(payload)
    return payload.numpy().tobytes()


def test_every_kind_of_message_has_a_golden_frame() -> None:
    kinds = {message["kind"] for message in MESSAGES.values()} | {"bucket"}
    assert kinds == set(re.findall(r'kind: Literal\["(\w+)"\]', source_of_messages()))
    assert kinds == set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))


def source_of_messages() -> str:
    assert messages.__file__ is not None
    return Path(messages.__file__).read_text()


def test_the_committed_files_are_what_the_script_makes() -> None:
    made = make_golden.files()
    assert sorted(made) == COMMITTED
    changed = [n for n in made if n not in make_golden.UNSTABLE and made[n] != golden(n)]
    assert changed == []


def test_the_script_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "held.bin").write_bytes(b"old")
    with pytest.raises(FileExistsError, match=r"held\.bin"):
        make_golden.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["held.bin"]
    (tmp_path / "held.bin").write_bytes(golden("held.bin"))
    assert sorted([*make_golden.write(tmp_path), "held.bin"]) == COMMITTED
    assert make_golden.write(tmp_path) == []


@pytest.mark.parametrize("name", MESSAGES)
def test_message_decodes_to_its_members_and_encodes_to_its_bytes(name: str) -> None:
    data = golden(f"{name}.bin")
    message, payload_bytes = decode(data)
    members = {key: tuples(value) for key, value in MESSAGES[name].items()}
    assert message.model_dump() == members
    assert payload_bytes == 0
    assert encode(message) == data
    assert encode(type(message)(**members)) == data


@pytest.mark.parametrize("name", BUCKETS)
def test_bucket_decodes_to_its_rows_and_encodes_to_its_bytes(name: str) -> None:
    frame, rows = golden(f"bucket-{name}.bin"), BUCKETS[name]
    header, payload = split(frame)
    message, payload_bytes = decode(header)
    assert isinstance(message, Bucket)
    assert payload_bytes == message.raw_bytes == len(payload)
    found = BucketReader(SPECS).read(torch.tensor(list(payload), dtype=torch.uint8), len(rows))
    assert as_lists(found) == as_lists(list(map(run_of, rows)))
    assert encode(message, payload_bytes=len(payload)) + pack(rows) == frame


def test_zstd_bucket_inflates_to_its_rows() -> None:
    header, payload = split(golden("bucket-zstd.bin"))
    message, payload_bytes = decode(header)
    assert isinstance(message, Bucket)
    assert payload_bytes == len(payload)
    raw = decompress(payload, compression=message.compression, raw_bytes=message.raw_bytes)
    assert raw == split(golden("bucket-dense.bin"))[1]
    assert raw == pack(DENSE)
    assert encode(message, payload_bytes=len(payload)) == header


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


@pytest.mark.parametrize("vector", json.loads(golden("digests.json"))["runs"])
def test_w18_run_vectors(vector: dict[str, Any]) -> None:
    ramp = np.arange(vector["count"], dtype=np.uint64) * np.uint64(int(vector["step"], 16))
    bits = ramp.astype(f"u{vector['item_size']}")
    found = digest_run(bits, key=seed_of(vector["name"]), start=int(vector["start"], 16))
    assert digest_text(found) == vector["digest"]
