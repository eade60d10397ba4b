from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.stores import Place, local_place, memory_place, s3_place, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return local_place(tmp_path / "store")
    if request.param == "memory":
        return memory_place()
    return s3_place(request.getfixturevalue("s3"))
