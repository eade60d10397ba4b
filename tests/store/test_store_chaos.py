"""A short chaos of a store: processes are killed, and every version and leftover is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from tests.worlds.stores import Place, s3_place, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


def chaos(versions: int, seed: int, place: Place | None = None) -> dict[str, object]:
    options = ["--versions", str(versions), "--seed", str(seed)]
    if place is not None:
        options += ["--url", place.url]
        for key, value in place.options.config.items():
            options += ["--config", f"{key}={value}"]
    done = CliRunner().invoke(app, ["store-chaos", *options])
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    assert found["failures"] == []
    assert done.exit_code == 0, done.output
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_folder_survives_the_death_of_all_who_use_it(seed: int) -> None:
    found = chaos(60, seed)
    assert found["versions"] == 60
    assert found["store"] == "folder"
    kills = found["kills"]
    assert isinstance(kills, dict)
    assert kills["writer"] > 0


@pytest.mark.slow
def test_a_bucket_survives_it_too(s3: str) -> None:
    found = chaos(20, 3, s3_place(s3))
    assert found["versions"] == 20
    assert found["store"] == "s3"
