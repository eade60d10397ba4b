"""What a store says of a version: strict JSON records, their canonical bytes, and their MAC.

docs/store.md, rules S1 to S11. Nothing in a record is trusted before `decode` has returned it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from itertools import pairwise
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from deltasync.errors import MacMismatch, ManifestInvalid
from deltasync.store.keys import ObjectKey
from deltasync.wire.messages import Count, Digest, StreamId, Version

FORMAT = 1
MAX_FILES = 16384  # of a way, such as an anchor of as many shards
MAX_CHANGED = 1 << 20  # parameters

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Label = Annotated[str, Field(min_length=1, max_length=256)]
Kind = Literal["anchor", "delta"]


class _Record(BaseModel):
    # Unknown members are dropped, and `decode` misses them: to report each takes a kilobyte.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class StoredFile(_Record):
    """One object: its key within the run, its length, and the SHA-256 of its bytes."""

    key: ObjectKey
    bytes: Count
    sha256: Sha256


class Way(_Record):
    """One way to hold a version: fetch `files`.

    Those of an `anchor` are safetensors and their index, of the whole model. A `delta` leads from
    the parent, and is one file of one-way frames.
    """

    kind: Kind
    files: Annotated[tuple[StoredFile, ...], Field(min_length=1, max_length=MAX_FILES), FailFast()]

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "delta" and len(self.files) != 1:
            raise ValueError("a delta is one file")
        if any(f"-{self.kind}-" not in file.key for file in self.files):
            raise ValueError(f"a {self.kind} with the key of another kind")
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch."""
        return sum(file.bytes for file in self.files)

    @property
    def keys(self) -> frozenset[str]:
        """The objects that it takes."""
        return frozenset(file.key for file in self.files)


class Written(_Record):
    """What manifests and anchors have in common.

    Attributes:
        run: The training run: `stream_id` of the frames of its deltas.
        version: Of the weights.
        writer: Who wrote it: 32 hexadecimal digits of its own, then what people call it.
        written_at: Of the writer's clock, ISO 8601. For people: nothing depends on it.
        way: How to get it.
        mac: HMAC-SHA256 of the canonical bytes without it; None without a key.
    """

    format: Literal[1] = 1
    run: StreamId
    version: Version
    writer: Label
    written_at: Annotated[str, Field(max_length=64)]
    way: Way
    mac: Sha256 | None = None

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if any(not file.key.startswith(f"objects/{self.version:016}-") for file in self.way.files):
            raise ValueError("a file of another version")
        return self


class Manifest(Written):
    """A version. It exists if and only if its manifest does.

    Attributes:
        parent: SHA-256 of the manifest of the version before; None for the first one of the run.
        digest: State digest of its weights.
        layout_hash: Names its parameters, see `layout_key`.
        numel: Elements of the model.
        nnz: Elements that differ from the parent's; `numel` if that is not known.
        changed: (number of a parameter, its digest) of each that differs from the parent, in
            order; of all, if there is no parent, or it has another layout, or that is not known.
    """

    kind: Literal["version"] = "version"
    parent: Sha256 | None
    digest: Digest
    layout_hash: Sha256
    numel: Count
    nnz: Count
    changed: Annotated[tuple[tuple[Count, Digest], ...], Field(max_length=MAX_CHANGED), FailFast()]

    @model_validator(mode="after")
    def _check_bases(self) -> Self:
        if (self.parent is None) != (self.version == 1):
            raise ValueError("version 1 has no parent, and every other version has one")
        if self.parent is None and self.way.kind == "delta":
            raise ValueError("a delta, and no parent")
        if self.nnz > self.numel or not self.numel:
            raise ValueError("nnz is more than numel, or there are no elements")
        numbers = [number for number, _ in self.changed]
        if any(one >= other for one, other in pairwise(numbers)):
            raise ValueError("changed is not in order")
        return self


class Anchor(Written):
    """An anchor that was written after the manifest of its version.

    Attributes:
        manifest: SHA-256 of the bytes of that manifest.
    """

    kind: Literal["anchor"] = "anchor"
    manifest: Sha256

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.way.kind == "delta":
            raise ValueError("a delta belongs into the manifest")
        return self


Record = TypeVar("Record", Manifest, Anchor)


def canonical(record: BaseModel) -> bytes:
    """The bytes of a record: JSON in ASCII, members sorted by name, without white space."""
    data = record.model_dump(mode="json")
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def signed(record: Record, mac_key: bytes | None) -> Record:
    """The record with its MAC, or without one if there is no key."""
    return record.model_copy(update={"mac": None if mac_key is None else _mac(record, mac_key)})


def sha256_of(data: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def decode(data: bytes, model: type[Record], *, key: str) -> Record:
    """Read a record.

    Args:
        data: The bytes of an object.
        model: What it has to be.
        key: The object, for messages.

    Raises:
        ManifestInvalid: It is not such a record, or not in canonical form.
    """
    try:
        record = model.model_validate_json(data)
    except ValidationError as error:
        raise ManifestInvalid(f"{key}: {first_fault(error)}; {_ADVICE}") from None
    if canonical(record) != data:
        raise ManifestInvalid(
            f"{key}: not in canonical form, or has more members than this build knows; {_ADVICE}"
        )
    return record


def check_mac(record: Manifest | Anchor, mac_key: bytes | None, *, key: str) -> None:
    """Raise MacMismatch unless the record was signed with this key; without a key, none is needed.

    Args:
        record: What was read.
        mac_key: The key of the run; None if manifests are not signed.
        key: The object, for messages.
    """
    if mac_key is None:
        return
    if record.mac is None:
        raise MacMismatch(f"{key}: is not signed, and a key was given; {_MAC_ADVICE}")
    if not hmac.compare_digest(record.mac, _mac(record, mac_key)):
        raise MacMismatch(f"{key}: its MAC is not of this key; {_MAC_ADVICE}")


def _mac(record: Manifest | Anchor, mac_key: bytes) -> str:
    data = canonical(record.model_copy(update={"mac": None}))
    return hmac.new(mac_key, data, hashlib.sha256).hexdigest()


_ADVICE = "it was altered, or a newer deltasync wrote it: restore the object, or upgrade"
_MAC_ADVICE = "give the key that the writer uses; if it is, do not use this store"


def first_fault(error: ValidationError) -> str:
    """Where a record is wrong first, and why, in a line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:40] for part in first["loc"][:4])
    return f"{where or 'record'}: {first['msg'][:200]}"
