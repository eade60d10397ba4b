from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.raw import Stored, signed_run
from tests.worlds.published import Publisher
from tests.worlds.stores import (
    Link,
    Place,
    linked,
    local_place,
    memory_place,
    s3_place,
    s3_server,
)


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


@pytest.fixture
def link(s3: str) -> Iterator[Link]:
    with linked(s3, part_bytes=5 << 20) as made:  # the least: an anchor of 8 MB has two parts
        yield made


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Six versions, with anchors at 1 and 4."""
    folder = tmp_path_factory.mktemp("made") / "store"
    trainer = Publisher(local_place(folder), anchor_every=3)
    trainer.publish(6)
    return Stored(folder, trainer.states)


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return signed_run(tmp_path_factory.mktemp("signed") / "store")


@pytest.fixture
def signed_copy(signed: Stored, tmp_path: Path) -> Stored:
    return copied(signed, tmp_path)


def copied(stored: Stored, folder: Path) -> Stored:
    shutil.copytree(stored.run, folder / "store")
    return Stored(folder / "store", stored.states)


@pytest.fixture
def stored(made: Stored, tmp_path: Path) -> Stored:
    """A copy, to be damaged."""
    return copied(made, tmp_path)
