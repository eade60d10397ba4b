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
import pytest
import torch
from safetensors import safe_open

from deltasync.errors import WriterConflict
from deltasync.files.frame_file import FrameFile
from deltasync.wire.frame import MAX_PAYLOAD_BYTES, decode
from tests.store.raw import (
    KEY,
    Json,
    Stored,
    bytes_of,
    read,
    sha256,
    signed_run,
)
from tests.store.test_sender import Model, run_of, sender_of
from tests.wire import reference
from tests.worlds.faults import faulty
from tests.worlds.stores import Place, local_place, s3_place

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "store.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return signed_run(tmp_path_factory.mktemp("made") / "store")


def test_s01_records_are_canonical(made: Stored) -> None:
    paths = [path for path in made.run.rglob("*.json") if "objects" not in path.parts]
    for path in paths:
        if path.parent.name != "layouts":
            record = read(path)
            assert path.read_bytes() == bytes_of(record)
            assert (record["format"], record["run"]) == (1, "run")
    kinds = {read(path)["kind"] for path in paths if path.parent.name != "layouts"}
    assert kinds == {"run", "version", "anchor"}


def test_s01_records_have_the_members_of_the_document(made: Stored) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`kind`.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    named = {
        kind: set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", text))) for kind, text in rows
    }
    paths = [made.run / "run.json", made.manifest(1), made.manifest(2)]
    for path in [*paths, *made.run.glob("anchors/*.json")]:
        record = read(path)
        assert set(record) == named[record["kind"]], path


def test_s02_a_manifest_comes_after_what_it_names(s3: str) -> None:
    seen: list[str] = []
    with faulty(s3) as (endpoint, faults):
        place = s3_place(s3, via=endpoint)
        faults.choose = lambda method, path: (
            seen.append(path) if method in ("PUT", "POST") else None
        )
        model = Model()
        sender = sender_of(model, place, anchor_every=2)
        for number in range(5):
            sender.publish()
            model.step(number)
        run = run_of(place)
        puts = [path.partition("/run/")[2].partition("?")[0] for path in seen]
        for version in run.versions():
            manifest = run.require(version).manifest
            at = puts.index(f"manifests/{version:016}.json")
            needs = [file.key for file in manifest.way.files]
            needs += ["run.json", f"layouts/{manifest.layout_hash}.json"]
            assert all(key in puts[:at] for key in needs)
            assert puts.count(puts[at]) == 1


def test_s02_no_manifest_is_ever_altered(tmp_path: Path) -> None:
    model, place = Model(), local_place(tmp_path)
    sender = sender_of(model, place, anchor_every=2)
    seen: dict[Path, bytes] = {}
    for number in range(7):
        sender.publish()
        model.step(number)
        found = {path: path.read_bytes() for path in tmp_path.glob("run/manifests/*")}
        assert seen.items() <= found.items()
        seen = found
    assert len(seen) == 7


def test_s03_a_manifest_of_another_ends_the_writer(place: Place) -> None:
    model = Model()
    sender = sender_of(model, place)
    sender.publish()
    objects = run_of(place).objects
    other = b"whatever it is"
    assert objects.create(f"manifests/{2:016}.json", other)
    before = sorted(facts.key for facts in objects.listed(""))
    for number in range(3):
        model.step(number)
        with pytest.raises(WriterConflict):
            sender.publish()
    assert objects.get(f"manifests/{2:016}.json", max_bytes=99) == other
    assert sorted(facts.key for facts in objects.listed("")) == before


def test_s04_versions_are_a_chain_from_1(made: Stored) -> None:
    assert made.versions() == list(range(1, 11))
    assert made.read(1)["parent"] is None
    for version in range(2, 11):
        before = sha256(made.manifest(version - 1).read_bytes())
        assert made.read(version)["parent"] == {"version": version - 1, "sha256": before}


def test_s05_frames_are_of_the_run_and_of_their_versions(made: Stored) -> None:
    kinds = []
    for version in made.versions():
        for way in made.ways(version):
            kinds.append((version, way["kind"]))
            if way["kind"] == "anchor":
                continue
            base, (file,) = version - 1, way["files"]
            messages = [
                decode(frame.header, max_payload_bytes=MAX_PAYLOAD_BYTES)[0].model_dump()
                for frame in FrameFile(made.run / file["key"])
            ]
            layout, begin, sealed = messages[0], messages[1], messages[-1]
            assert {layout["stream_id"], begin["stream_id"]} == {"run"}
            assert layout["version"] == begin["base_version"] == base
            assert begin["version"] == sealed["version"] == version
            assert layout["digest"] == made.read(base)["digest"]
            assert sealed["digest"] == made.read(version)["digest"]
            assert begin["layout_hash"] == made.read(version)["layout_hash"]
            assert made.read(base)["layout_hash"] == made.read(version)["layout_hash"]
    assert {kind for _, kind in kinds} == {"anchor", "delta"}
    assert [kind for version, kind in kinds if version == 7] == ["anchor"]


def test_s06_anchors_have_each_parameter_once(made: Stored) -> None:
    anchors = 0
    for version in made.versions():
        for way in made.ways(version):
            if way["kind"] == "anchor":
                anchors += 1
                names = names_in(made, way)
                assert sorted(names) == sorted(entry[0][0] for entry in made.layout(version))
    assert anchors >= 4


def names_in(made: Stored, way: Json) -> list[str]:
    names: list[str] = []
    for file in way["files"]:
        if file["key"].endswith(".safetensors"):
            with safe_open(made.run / file["key"], "pt") as found:
                names += found.keys()
    return names


def test_s07_changed_lists_what_differs(made: Stored) -> None:
    for version in made.versions():
        found, layout = made.read(version), made.layout(version)
        digests = [digest_of(entry, made.states[version]) for entry in layout]
        wanted: list[Any] = [[n, digest] for n, digest in enumerate(digests)]
        if version not in (1, 7):
            old = [digest_of(entry, made.states[version - 1]) for entry in layout]
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


def test_s08_objects_are_as_their_manifests_say(made: Stored) -> None:
    for version in made.versions():
        if (path := made.anchor(version)).exists():
            assert read(path)["manifest"] == sha256(made.manifest(version).read_bytes())
        for file in (file for way in made.ways(version) for file in way["files"]):
            data = (made.run / file["key"]).read_bytes()
            assert (file["bytes"], file["sha256"]) == (len(data), sha256(data))


def mac_of(record: Json) -> str:
    return hmac.new(KEY, bytes_of(record | {"mac": None}), hashlib.sha256).hexdigest()


def test_s09_records_are_signed(made: Stored) -> None:
    paths = [*made.run.glob("manifests/*.json"), *made.run.glob("anchors/*.json")]
    assert len(paths) == 12
    for path in paths:
        record = read(path)
        assert record["mac"] == mac_of(record)


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    rules = re.findall(r"^- \*\*S(\d+)\*\*", DOCUMENT.read_text(), re.MULTILINE)
    names = (
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def test((?:_s\d\d)+)_", path.read_text(), re.MULTILINE)
    )
    tests = {int(number) for name in names for number in re.findall(r"\d\d", name)}
    assert list(map(int, rules)) == sorted(tests) == list(range(1, len(rules) + 1))
