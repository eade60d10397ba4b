"""Names of the objects of a store: docs/store.md has them in a table.

A key is relative to the URL, so that a run can be copied or moved as a whole. Objects that a
manifest names have a random part: two writers never write one object.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated

from pydantic import Field

MANIFESTS, ANCHORS, LAYOUTS, OBJECTS = "manifests", "anchors", "layouts", "objects"

_DIGITS = 16  # of a version, which is below 2^53
_VERSION = re.compile(r"(?:manifests|anchors)/([0-9]{16})\.json|objects/([0-9]{16})(?s:.*)")
_KEY = r"objects/[0-9]{16}-(anchor|delta)-[0-9a-f]{16}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127}|\.dsyn)"

ObjectKey = Annotated[str, Field(pattern=f"^{_KEY}$")]


def manifest_key(version: int) -> str:
    """The manifest of a version. Keys sort as versions do."""
    return f"{MANIFESTS}/{version:0{_DIGITS}}.json"


def version_of(key: str) -> int | None:
    """The version whose manifest, anchor or object has this key; None if it is none of them."""
    found = _VERSION.fullmatch(key)
    return None if found is None else int(found[1] or found[2])


def anchor_key(version: int) -> str:
    """The anchor of a version that came after its manifest."""
    return f"{ANCHORS}/{version:0{_DIGITS}}.json"


def layout_key(layout_hash: str) -> str:
    """The parameters of a layout, named by their SHA-256."""
    return f"{LAYOUTS}/{layout_hash}.json"


def frames_key(version: int) -> str:
    """A new name for the frames of a delta."""
    return f"{_object(version, 'delta')}.dsyn"


def anchor_folder(version: int) -> str:
    """A new name for a folder of safetensors files, without a slash at its end."""
    return _object(version, "anchor")


def _object(version: int, kind: str) -> str:
    return f"{OBJECTS}/{version:0{_DIGITS}}-{kind}-{secrets.token_hex(8)}"
