"""Records: what a store says is taken only if it is exactly what it should be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deltasync.errors import ManifestInvalid
from deltasync.store.manifest import (
    Anchor,
    Manifest,
    canonical,
    check_mac,
    decode,
    sha256_of,
    signed,
)
from tests.store.raw import bytes_of

ZEROS = "0" * 64


def way_of(version: int, kind: str, **more: Any) -> dict[str, Any]:
    name = f"objects/{version:016}-{kind}-{1:016x}"
    name += "/model.safetensors" if kind == "anchor" else ".dsyn"
    files = [{"key": name, "bytes": 7, "sha256": ZEROS}]
    return {"kind": kind, "files": files} | more


def at(key: str) -> dict[str, Any]:
    return {"way": way_of(2, "delta", files=[{"key": key, "bytes": 7, "sha256": ZEROS}])}


GOOD: dict[str, Any] = {
    "kind": "version",
    "format": 1,
    "run": "run",
    "version": 2,
    "parent": ZEROS,
    "way": way_of(2, "delta"),
    "digest": "0123456789abcdef",
    "layout_hash": ZEROS,
    "numel": 10,
    "nnz": 3,
    "changed": [[0, "0" * 16], [4, "f" * 16]],
    "writer": "0" * 32 + " host:1",
    "written_at": "2026-01-01T00:00:00+00:00",
    "mac": None,
}
DATA, DELTA = bytes_of(GOOD), way_of(2, "delta")
FIRST = {"version": 1, "way": way_of(1, "delta")}
FILE = f"objects/{2:016}-delta-{1:016x}.dsyn"


def test_s01_s09_the_bytes_and_the_mac_are_those_of_the_rules() -> None:
    found = decode(DATA, Manifest, key="k")
    assert (canonical(found), found.way.num_bytes) == (DATA, 7)
    record = signed(found, b"key")
    assert sha256_of(canonical(record.model_copy(update={"mac": None}))) == (
        "edf3be3e27fcf40b4b9f94dd280d3a7e7ea41906679b6f1a2a9b6b3722888537"
    )
    assert record.mac == "dac2bef5a1b96f45972a9103d1063a93e04ba38e394b657bf408243ff425d7b4"
    check_mac(record, b"key", key="k")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"format": 2}, "format"),
        ({"version": 0}, "another version"),
        ({"version": 1 << 53}, "version"),
        ({"version": 2.0}, "version"),
        ({"parent": ZEROS[1:]}, "parent"),
        ({"parent": None}, "version 1 has no parent"),
        (FIRST | {"parent": None}, "a delta, and no parent"),
        (FIRST, "version 1 has no parent"),
        ({"way": DELTA | {"files": []}}, "files"),
        ({"way": DELTA | {"files": DELTA["files"] * 2}}, "one file"),
        ({"way": way_of(3, "anchor")}, "another version"),
        ({"way": way_of(2, "anchor") | {"kind": "delta"}}, "another kind"),
        ({"digest": "0" * 15}, "digest"),
        ({"nnz": 11}, "nnz"),
        ({"changed": [[4, "0" * 16], [4, "0" * 16]]}, "order"),
        ({"run": ""}, "run"),
        ({"more": 1}, "more"),
        *((at(key), "key") for key in ("objects/../secret", "/etc/passwd", f"{FILE}/../x")),
        *((at(key), "key") for key in (FILE.upper(), f"{FILE}\n", f"{FILE[:-5]}/.hidden")),
        (at(FILE.replace(".", "g.")), "key"),
        *(({name: ...}, f"{name}|canonical") for name in GOOD),
    ],
)
def test_s01_s04_s05_what_breaks_a_rule_is_refused(more: dict[str, Any], said: str) -> None:
    data = {name: value for name, value in (GOOD | more).items() if value is not ...}
    with pytest.raises(ManifestInvalid, match=said):
        decode(bytes_of(data), Manifest, key="k")


def test_s05_a_later_anchor_is_no_delta() -> None:
    head = {name: GOOD[name] for name in ("format", "run", "version", "writer")}
    data = head | {"kind": "anchor", "written_at": "", "mac": None, "manifest": ZEROS}
    decode(bytes_of(data | {"way": way_of(2, "anchor")}), Anchor, key="k")
    with pytest.raises(ManifestInvalid, match="belongs into the manifest"):
        decode(bytes_of(data | {"way": DELTA}), Anchor, key="k")


MANY = {f"k{number}": "x" for number in range(100_000)}
HOSTILE = [
    b"[" * 100_000,
    b"\xff\xfe{}",
    b"null",
    DATA + b"\n",
    DATA.replace(b'"nnz":3', b'"nnz":3,"nnz":3'),
    DATA.replace(b":", b": "),
    DATA.replace(b'"run"', b'"\\u0072un"'),
    bytes_of(GOOD | MANY),
    bytes_of(GOOD | {"changed": list(MANY)}),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_s01_hostile_bytes_are_refused_in_memory_of_proportion(data: bytes) -> None:
    """To report each of many faults would take a kilobyte, and a manifest may have millions."""
    models: list[Any] = [Manifest, Anchor]
    for model in models:
        with pytest.raises(ManifestInvalid) as raised:
            decode(data, model, key="k")
        cause = raised.value.__context__
        assert not isinstance(cause, ValidationError) or cause.error_count() <= 12
