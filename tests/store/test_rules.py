"""Rules S1 to S9 of docs/store.md, read off the bytes that a writer leaves.

Tests whose names have the number of a rule are in the other files of this folder too.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Any

from deltasync.delta.bits import as_bits
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.patch_file import PatchFile, apply_patch_file
from tests.store.raw import KEY, Stored, bytes_of, read
from tests.wire import reference
from tests.wire.digests import digest_run
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


def test_s05_s06_deltas_are_patch_files_and_anchors_have_each_parameter(
    signed: Stored, tmp_path: Path
) -> None:
    kinds = {v: [way["kind"] for way in signed.ways(v)] for v in signed.versions()}
    also = {4: ["delta", "anchor"], 10: ["delta", "anchor"], 1: ["anchor"], 7: ["anchor"]}
    assert kinds == {version: ["delta"] for version in kinds} | also
    for version, ways in kinds.items():
        if "anchor" in ways:
            (anchor,) = signed.run.glob(f"objects/{version:016}-anchor-*")
            names = sorted(entry[0][0] for entry in signed.layout(version))
            assert sorted(Checkpoint(anchor).specs) == names
        if "delta" not in ways:
            held = anchor
            continue
        (path,), made = signed.objects(version, "delta"), tmp_path / str(version)
        digest = apply_patch_file(PatchFile(path), Checkpoint(held), made)
        assert digest == int(signed.read(version)["digest"], 16)
        held, found = made, Checkpoint(made)
        assert all(same_bits(found.tensor(n), signed.states[version][n]) for n in found.specs)


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
    name = entry[0][0]
    bits = as_bits(state[name]).reshape(-1).numpy().view(f"u{state[name].element_size()}")
    return f"{digest_run(bits, key=reference.seed(name), start=0):016x}"


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    rules = re.findall(r"^- \*\*S(\d+)\*\*", DOCUMENT.read_text(), re.MULTILINE)
    names = (
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def test((?:_s\d\d)+)_", path.read_text(), re.MULTILINE)
    )
    tests = {int(number) for name in names for number in re.findall(r"\d\d", name)}
    assert list(map(int, rules)) == sorted(tests) == list(range(1, len(rules) + 1))
