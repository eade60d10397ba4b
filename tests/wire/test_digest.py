"""The state digest gives its vectors, as plain integers do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from deltasync.delta.ledger import digest_text
from deltasync.wire import digest as d
from tests.golden.make_golden import FOLDER
from tests.wire import reference
from tests.wire.digests import digest_at, digest_run

VECTORS = json.loads((FOLDER / "digests.json").read_text())


@pytest.mark.parametrize("vector", [*VECTORS["elements"], *VECTORS["runs"]])
def test_w18_vectors(vector: dict[str, Any]) -> None:
    key, dtype = d.seed(vector["name"]), f"u{vector['item_size']}"
    if "positions" in vector:
        bits = np.array([int(one, 16) for one in vector["bits"]], dtype)
        positions = np.array([int(one, 16) for one in vector["positions"]], np.int64)
        found = digest_at(positions, bits, key=key)
    else:
        ramp = np.arange(vector["count"], dtype=np.uint64) * np.uint64(int(vector["step"], 16))
        bits, start = ramp.astype(dtype), int(vector["start"], 16)
        positions = np.arange(start, start + vector["count"])
        found = digest_run(bits, key=key, start=start)
    assert found == reference.digest(key, positions.tolist(), bits.tolist())
    assert digest_text(found) == vector["digest"]


def test_w18_seeds() -> None:
    assert {name: digest_text(d.seed(name)) for name in VECTORS["seeds"]} == VECTORS["seeds"]
