"""Rules S1 to S9 of docs/store.md, read off the bytes that a writer leaves.

Tests whose names have the number of a rule are in the other files of this folder too.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from deltasync.files.checkpoint import Checkpoint
from deltasync.files.frame_file import FrameFile
from deltasync.files.patch_file import PatchFile, apply_patch_file
from deltasync.wire.frame import MAX_PAYLOAD_BYTES, decode
from tests.store.raw import KEY, Json, Stored, bytes_of, read, sha256
from tests.wire import reference
from tests.worlds.strategies import same_bits

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "store.md"


def test_s01_s09_records_are_canonical_signed_and_as_the_document_has_them(signed: Stored) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`kind`.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    named = {
        kind: set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", text))) for kind, text in rows
    }
    kinds = list[str]()
    for path in signed.run.glob("[ma]*/*.json"):
        record = read(path)
        kinds.append(record["kind"])
        assert path.read_bytes() == bytes_of(record)
        assert (record["format"], record["run"]) == (1, "run")
        assert set(record) == named[record["kind"]], path
        data = bytes_of(record | {"mac": None})
        assert record["mac"] == hmac.new(KEY, data, hashlib.sha256).hexdigest()
    assert {kind: kinds.count(kind) for kind in named} == {"version": 10, "anchor": 2}


def test_s04_s08_versions_are_a_chain_from_1_and_name_what_is_there(signed: Stored) -> None:
    assert signed.versions() == list(range(1, 11))
    assert signed.read(1)["parent"] is None
    for version in signed.versions():
        here = sha256(signed.manifest(version).read_bytes())
        if version < 10:
            assert signed.read(version + 1)["parent"] == here
        if (path := signed.anchor(version)).exists():
            assert read(path)["manifest"] == here
        for file in (file for way in signed.ways(version) for file in way["files"]):
            data = (signed.run / file["key"]).read_bytes()
            assert (file["bytes"], file["sha256"]) == (len(data), sha256(data))


def test_s05_frames_are_of_the_run_and_of_their_versions(signed: Stored, tmp_path: Path) -> None:
    """A delta is a patch file, that fits on the version before."""
    kinds = {v: [way["kind"] for way in signed.ways(v)] for v in signed.versions()}
    also = {4: ["delta", "anchor"], 10: ["delta", "anchor"], 1: ["anchor"], 7: ["anchor"]}
    assert kinds == {version: ["delta"] for version in kinds} | also
    for version, ways in kinds.items():
        if "delta" not in ways:
            (held,) = signed.run.glob(f"objects/{version:016}-anchor-*")
            continue
        (path,), base, this = signed.objects(version, "delta"), version - 1, signed.read(version)
        messages: list[Any] = [
            decode(frame.header, max_payload_bytes=MAX_PAYLOAD_BYTES)[0].model_dump()
            for frame in FrameFile(path)
        ]
        layout, begin, sealed = messages[0], messages[1], messages[-1]
        assert {layout["stream_id"], begin["stream_id"]} == {"run"}
        assert layout["version"] == begin["base_version"] == base
        assert begin["version"] == sealed["version"] == version
        assert layout["digest"] == signed.read(base)["digest"]
        assert sealed["digest"] == this["digest"]
        assert begin["layout_hash"] == signed.read(base)["layout_hash"] == this["layout_hash"]
        made = tmp_path / str(version)
        assert apply_patch_file(PatchFile(path), Checkpoint(held), made) == int(this["digest"], 16)
        held = made
        found = Checkpoint(held)
        assert all(same_bits(found.tensor(n), signed.states[version][n]) for n in found.specs)


def test_s06_anchors_have_each_parameter_once(signed: Stored) -> None:
    for version in (1, 4, 7, 10):
        (way,) = (way for way in signed.ways(version) if way["kind"] == "anchor")
        assert sorted(names_in(signed, way)) == sorted(e[0][0] for e in signed.layout(version))


def names_in(stored: Stored, way: Json) -> list[str]:
    names: list[str] = []
    for file in way["files"]:
        if file["key"].endswith(".safetensors"):
            with safe_open(stored.run / file["key"], "pt") as found:
                names += found.keys()
    return names


def test_s07_changed_lists_what_differs(signed: Stored) -> None:
    for version in signed.versions():
        found, layout = signed.read(version), signed.layout(version)
        digests = [digest_of(entry, signed.states[version]) for entry in layout]
        wanted: list[Any] = [[n, digest] for n, digest in enumerate(digests)]
        if version not in (1, 7):
            old = [digest_of(entry, signed.states[version - 1]) for entry in layout]
            wanted = [pair for pair in wanted if pair[1] != old[pair[0]]]
            assert 0 < len(wanted) < len(layout)
        assert found["changed"] == wanted
        assert int(found["digest"], 16) == sum(int(one, 16) for one in digests) % (1 << 64)


def digest_of(entry: list[Any], state: Any) -> str:
    """Section 5 of docs/wire-format.md, of one parameter."""
    data = state[entry[0][0]].reshape(-1).view(torch.uint8).numpy().tobytes()
    size = state[entry[0][0]].element_size()
    x = np.frombuffer(data, f"<u{size}").astype(np.uint64)
    x += np.uint64(reference.seed(entry[0][0]))
    x += np.arange(len(x), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return f"{int(x.sum(dtype=np.uint64)):016x}"


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    rules = re.findall(r"^- \*\*S(\d+)\*\*", DOCUMENT.read_text(), re.MULTILINE)
    names = (
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def test((?:_s\d\d)+)_", path.read_text(), re.MULTILINE)
    )
    tests = {int(number) for name in names for number in re.findall(r"\d\d", name)}
    assert list(map(int, rules)) == sorted(tests) == list(range(1, len(rules) + 1))
