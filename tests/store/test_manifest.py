"""Records: what a store says is taken only if it is exactly what it should be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltasync.errors import ManifestInvalid
from deltasync.store import keys
from deltasync.store.manifest import (
    Anchor,
    Manifest,
    RunRecord,
    canonical,
    check_mac,
    decode,
    sha256_of,
    signed,
)

MODELS: list[Any] = [Manifest, Anchor, RunRecord]
ZEROS = "0" * 64


def file_of(version: int, kind: str, number: int = 1) -> dict[str, Any]:
    name = f"objects/{version:016}-{kind}-{number:016x}"
    name += "/model.safetensors" if kind == "anchor" else ".dsyn"
    return {"key": name, "bytes": 7, "sha256": ZEROS}


def way_of(version: int, kind: str, number: int = 1) -> dict[str, Any]:
    return {
        "kind": kind,
        "files": [file_of(version, kind, number)],
        "codecs": {"zstd": 5},
    }


def manifest(**more: Any) -> dict[str, Any]:
    return {
        "kind": "version",
        "format": 1,
        "run": "run",
        "version": 2,
        "parent": {"version": 1, "sha256": ZEROS},
        "way": way_of(2, "delta"),
        "digest": "0123456789abcdef",
        "layout_hash": ZEROS,
        "numel": 10,
        "nnz": 3,
        "changed": [[0, "0" * 16], [4, "f" * 16]],
        "writer": "0" * 32 + " host:1",
        "written_at": "2026-01-01T00:00:00+00:00",
        "mac": None,
    } | more


def bytes_of(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def test_a_manifest_is_read_as_it_was_written() -> None:
    data = bytes_of(manifest())
    found = decode(data, Manifest, key="k")
    assert canonical(found) == data
    assert found.way.num_bytes == 7


def test_s01_s09_the_bytes_and_the_mac_are_those_of_the_rules() -> None:
    record = signed(decode(bytes_of(manifest()), Manifest, key="k"), b"key")
    assert sha256_of(canonical(record.model_copy(update={"mac": None}))) == (
        "682232c64197eddc7080a67c375a25f287dd7b3d820a7e9d5b6a6c33c63dc6f5"
    )
    assert record.mac == "df8123e4a8909e2e9d5726c223509843b12c3ce0e8da2fe5b2c7da0b62bb6624"
    check_mac(record, b"key", key="k")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"format": 2}, "format"),
        ({"version": 0}, "another version"),
        ({"version": -1}, "version"),
        ({"version": 1 << 53}, "version"),
        ({"version": 2.0}, "version"),
        ({"version": True}, "version"),
        ({"parent": {"version": 0, "sha256": ZEROS}}, "not the version before"),
        ({"parent": None}, "no parent"),
        ({"way": None}, "way"),
        ({"way": [way_of(2, "delta")]}, "way"),
        ({"way": way_of(2, "fold")}, "kind"),
        ({"way": way_of(2, "delta") | {"files": []}}, "files"),
        ({"way": way_of(2, "delta") | {"files": [file_of(2, "delta")] * 2}}, "one file"),
        ({"way": way_of(3, "anchor")}, "another version"),
        ({"way": way_of(2, "anchor") | {"kind": "delta"}}, "another kind"),
        ({"digest": "0" * 15}, "digest"),
        ({"digest": "0" * 15 + "G"}, "digest"),
        ({"layout_hash": ZEROS + "\n"}, "layout_hash"),
        ({"nnz": 11}, "nnz"),
        ({"numel": 0, "nnz": 0}, "no elements"),
        ({"numel": -1}, "numel"),
        ({"changed": [[4, "0" * 16], [0, "0" * 16]]}, "order"),
        ({"changed": [[4, "0" * 16], [4, "0" * 16]]}, "order"),
        ({"changed": [[4]]}, "changed"),
        ({"writer": ""}, "writer"),
        ({"run": "../run"}, "run"),
        ({"mac": "x"}, "mac"),
        ({"kind": "anchor"}, "kind"),
        ({"more": 1}, "more"),
    ],
)
def test_s01_s04_s05_what_breaks_a_rule_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ManifestInvalid, match=said):
        decode(bytes_of(manifest(**more)), Manifest, key="k")


@pytest.mark.parametrize("name", sorted(manifest()))
def test_s01_no_member_may_be_missing(name: str) -> None:
    data = manifest()
    del data[name]
    with pytest.raises(ManifestInvalid):
        decode(bytes_of(data), Manifest, key="k")


@pytest.mark.parametrize(
    "key",
    [
        "objects/../secret",
        "/etc/passwd",
        f"objects/{2:016}-delta-{1:016x}.dsyn/../x",
        f"objects/{2:016}-delta-{1:016x}.DSYN",
        f"objects/{2:016}-delta-{1:016x}.dsyn\n",
        f"objects/{2:016}-delta-{1:016x}/.hidden",
        f"objects/{2:016}-delta-{1:016X}g.dsyn",
    ],
)
def test_keys_lead_nowhere_else(key: str) -> None:
    way = way_of(2, "delta")
    way["files"][0]["key"] = key
    with pytest.raises(ManifestInvalid):
        decode(bytes_of(manifest(way=way)), Manifest, key="k")


def test_s05_a_later_anchor_is_no_delta() -> None:
    head = {name: manifest()[name] for name in ("format", "run", "version", "writer")}
    data = head | {"kind": "anchor", "written_at": "", "mac": None, "manifest": ZEROS}
    decode(bytes_of(data | {"way": way_of(2, "anchor")}), Anchor, key="k")
    with pytest.raises(ManifestInvalid, match="belongs into the manifest"):
        decode(bytes_of(data | {"way": way_of(2, "delta")}), Anchor, key="k")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe{}",
        b"9" * 100_000,
        b'{"version":' + b"9" * 5000 + b"}",
        b'{"kind":"version","kind":"version"}',
        b"null",
        b"NaN",
        bytes_of(manifest()).replace(b'"nnz":3', b'"nnz":3,"nnz":3'),
        bytes_of(manifest()).replace(b":", b": "),
        bytes_of(manifest()).replace(b'"run"', b'"\\u0072un"'),
    ],
    ids=range(11),
)
def test_s01_hostile_bytes_are_refused(data: bytes) -> None:
    for model in MODELS:
        with pytest.raises(ManifestInvalid):
            decode(data, model, key="k")


_MANY = {f"k{number}": "x" for number in range(100_000)}


@pytest.mark.parametrize(
    "data",
    [
        manifest() | _MANY,
        manifest(parent=_MANY),
        manifest(way=way_of(2, "delta") | _MANY),
        manifest(way=way_of(2, "delta") | {"codecs": _MANY}),
        manifest(way=way_of(2, "delta") | {"files": [_MANY]}),
        manifest(way=list(_MANY)),
        manifest(changed=list(_MANY)),
        manifest(changed=[[4, *_MANY]]),
    ],
    ids=range(8),
)
def test_s01_many_faults_take_memory_in_proportion(data: dict[str, Any]) -> None:
    """To report each of them would take a kilobyte, and a manifest may have millions."""
    text = bytes_of(data)
    with pytest.raises(ManifestInvalid) as raised:
        decode(text, Manifest, key="k")
    cause = raised.value.__context__
    assert not isinstance(cause, ValidationError) or cause.error_count() <= 10
    assert len(str(raised.value)) < 400


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(data=st.binary(max_size=200) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_s01_arbitrary_bytes_are_refused(data: bytes) -> None:
    for model in MODELS:
        with pytest.raises(ManifestInvalid):
            decode(data, model, key="k")


@given(name=st.sampled_from(sorted(manifest())), value=_JSON)
def test_s01_a_record_is_canonical_or_refused(name: str, value: Any) -> None:
    data = bytes_of(manifest(**{name: value}))
    try:
        found = decode(data, Manifest, key="k")
    except ManifestInvalid:
        return
    assert canonical(found) == data


@given(at=st.integers(0, len(bytes_of(manifest())) - 1), byte=st.integers(0, 255))
def test_s09_a_changed_byte_changes_the_mac_or_is_refused(at: int, byte: int) -> None:
    record = signed(decode(bytes_of(manifest()), Manifest, key="k"), b"key")
    data = bytearray(canonical(record))
    data[at] = byte
    if bytes(data) == canonical(record):
        return
    try:
        found = decode(bytes(data), Manifest, key="k")
    except ManifestInvalid:
        return
    assert signed(found, b"key").mac != record.mac or found.mac != record.mac


@given(text=st.text(max_size=60))
def test_any_key_has_a_version_or_none(text: str) -> None:
    for prefix in ("", "manifests/", "objects/", "anchors/"):
        found = keys.version_of(prefix + text)
        assert found is None or found >= 0


def test_keys_sort_as_versions_do() -> None:
    versions = [0, 1, 9, 10, 99, 12345, (1 << 53) - 1]
    assert sorted(map(keys.manifest_key, versions)) == list(map(keys.manifest_key, versions))
    for version in versions:
        for key in (
            keys.manifest_key(version),
            keys.anchor_key(version),
            keys.frames_key(version),
        ):
            assert keys.version_of(key) == version
