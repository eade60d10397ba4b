"""Committed bytes of format version 2: decoded to what they say, and made again bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta import gap
from deltasync.delta.bits import Flat, integer_dtype, torch_dtype
from deltasync.delta.changes import Changes
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.shard import whole
from deltasync.delta.staging import Lane, LiveWeights
from deltasync.delta.tiles import Space, space_of, table_of
from deltasync.wire import messages
from deltasync.wire.frame import HEADER_BYTES, decode, encode
from deltasync.wire.messages import Begin, Message, ParameterSpec
from tests.golden import make_golden
from tests.golden.make_golden import BUCKETS, CHANGED, CODED, FOLDER, MESSAGES, SHARES
from tests.wire import reference
from tests.wire.reference import Tile

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"


def specs_of(parameters: list[Any]) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(tuple(names), tuple(shape), dtypes.BY_CODE[code])
        for names, shape, code in parameters
    )


SPECS, SPACE = specs_of(MESSAGES["layout"]["parameters"]), Space(whole(specs_of(CHANGED)))


def golden(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def opened(name: str) -> tuple[Message, Tensor]:
    """(message, payload) of a file, whose header is made again."""
    data = golden(f"{name}.bin")
    end = HEADER_BYTES + int.from_bytes(data[8:12], "little")
    message, payload_bytes = decode(data[:end])
    assert payload_bytes == len(data) - end
    assert encode(message, payload_bytes=payload_bytes) == data[:end]
    return message, tensor(data[end:])


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def unsigned(bits: Tensor) -> list[int]:
    found: list[int] = bits.numpy().view(f"u{bits.element_size()}").tolist()
    return found


def old_weights() -> dict[int, Flat]:
    """What the coded payloads are made from."""
    bits: list[list[int]] = [[] for _ in SPACE.shares]
    for tile, (number, _, numel) in enumerate(
        reference.tiles_of([(s.spec.dtype.item_size, s.numel) for s in SPACE.given])
    ):
        bits[number] += [make_golden.old(tile, place) for place in range(numel)]
    flats = {}
    for number, (share, some) in enumerate(zip(SPACE.given, bits, strict=True)):
        dtype = share.spec.dtype
        raw = np.array(some, f"<u{dtype.item_size}").view(np.uint8)
        line = torch.from_numpy(raw.copy()).view(integer_dtype(dtype))
        flats[number] = Flat.of(line.view(torch_dtype(dtype)))
    return flats


def read(message: Message, payload: Tensor) -> Changes:
    assert isinstance(message, messages.Bucket)
    reader = PayloadReader(LiveWeights(old_weights(), SPACE))
    begin = {**make_golden.MESSAGES["begin-full"], "places": 1 << 40}
    reader.begin(Begin(**begin))
    return reader.read(message, payload).changes


def tiles_of(changes: Changes) -> list[Tile]:
    """What changes say, column by column."""
    tiles, counts = changes.table()
    places, values, whole = map(unsigned, (changes.places, changes.values, changes.whole))
    found, size = [], changes.sizes.item_size
    for tile, count in zip(tiles.tolist(), counts.tolist(), strict=True):
        if count:
            found.append(Tile(tile, tuple(places[:count]), tuple(values[:count])))
            places, values = places[count:], values[count:]
        else:
            numel = int(SPACE.numel[tile])
            found.append(Tile(tile, None, tuple(whole[:numel])))
            whole = whole[numel + -numel % (16 // size) :]
    assert not places + values + whole
    return found


def test_every_kind_of_message_has_a_golden_frame() -> None:
    assert messages.__file__ is not None
    source = Path(messages.__file__).read_text()
    kinds = {message["kind"] for message in MESSAGES.values()} | {"bucket", "shares"}
    assert kinds == set(re.findall(r'kind: Literal\["(\w+)"\]', source))
    assert kinds == set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))


def test_the_committed_files_are_what_the_script_makes() -> None:
    made = make_golden.files()
    assert sorted([*made, "digests.json"]) == sorted(path.name for path in FOLDER.iterdir())
    changed = [n for n in made if n not in make_golden.UNSTABLE and made[n] != golden(n)]
    assert changed == []


@pytest.mark.parametrize("name", MESSAGES)
def test_message_decodes_to_its_members_and_encodes_to_its_bytes(name: str) -> None:
    message, payload = opened(name)
    members = {key: tuples(value) for key, value in MESSAGES[name].items()}
    assert message.model_dump() == members
    assert not len(payload)
    assert encode(type(message)(**members)) == golden(f"{name}.bin")


@pytest.mark.parametrize("name", [*BUCKETS, "zstd"])
def test_w10_w15_bucket_decodes_to_its_changes(name: str) -> None:
    size, tiles = BUCKETS["mixed" if name == "zstd" else name]
    message, payload = opened(f"bucket-{name}")
    changes = read(message, payload)
    assert changes.sizes.item_size == size
    assert tiles_of(changes) == tiles


@pytest.mark.parametrize("name", [*CODED, "zstd"])
def test_w27_coded_bucket_decodes_to_its_changes_and_encodes_to_its_bytes(name: str) -> None:
    size, tiles = BUCKETS["mixed"] if name == "zstd" else CODED[name]
    message, payload = opened(f"bucket-gap-{name}")
    changes = read(message, payload)
    assert tiles_of(changes) == tiles
    if name == "zstd":
        return
    sent = Changes.of(tensor(reference.payload(tiles, size)), changes.sizes)
    lane = Lane(LiveWeights(old_weights(), SPACE), SPACE)
    assert gap.encode(sent, *lane.old(sent)) == payload.numpy().tobytes()


def test_w17_shares_are_read_and_made_again() -> None:
    message, payload = opened("shares")
    assert isinstance(message, messages.Shares)
    space = space_of(payload.numpy(), SPECS)
    assert message.num_shares == len(space.given) == len(SHARES)
    for share, (number, start, rows, cols, stride) in zip(space.given, SHARES, strict=True):
        inside = [start + row * stride + col for row in range(rows) for col in range(cols)]
        assert share.number == number
        assert share.region.places(torch.arange(share.numel)).tolist() == inside
    assert table_of(space).tobytes() == payload.numpy().tobytes()


def test_layout_hash_is_that_of_the_golden_parameters() -> None:
    layout, _ = decode(golden("layout.bin"))
    assert isinstance(layout, messages.Layout)
    assert layout.specs() == SPECS
    assert messages.entries(SPECS) == layout.parameters
    text = make_golden.text_of(MESSAGES["layout"])
    inner = text[len(b'{"parameters":') : text.index(b',"kind"')]
    assert messages.layout_hash(SPECS) == make_golden.sha256(inner)


def test_the_documents_dtype_codes_are_all() -> None:
    (said,) = re.findall(r"Dtype codes: ([^.]*)\.", DOCUMENT.read_text())
    found = [(int(code), name) for code, name in re.findall(r"(\d+)\s+`(\w+)`", said)]
    assert found == [(dtype.code, dtype.name) for dtype in dtypes.DTYPES]


def test_the_documents_example_is_the_golden_payload() -> None:
    dump = re.findall(r"^[0-9a-f]{8}  ([0-9a-f ]+?) +\|", DOCUMENT.read_text(), re.MULTILINE)
    _, payload = opened("bucket-example")
    assert bytes.fromhex(" ".join(dump)) == payload.numpy().tobytes()
