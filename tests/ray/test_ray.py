"""The recipe for Ray, run as it is: what it says of every sync, as engines die and are added."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.engines.environment import ROOT
from tests.engines.programs import Program

pytestmark = pytest.mark.timeout(600)

Sync = dict[str, str]
"""The named groups of SYNC."""

SYNC = re.compile(
    r"v(?P<version>\d+): (?P<kind>full|delta), [\d.]+% of [\d,]+ elements, [\d,]+ bytes, "
    r"(?P<receivers>\d+) receivers \((?P<joined>\d+) joined, (?P<lost>\d+) lost\), [\d.]+ ms"
)


@pytest.fixture(scope="module")
def syncs(ray_environment: None) -> Iterator[list[Sync]]:
    with Program(ROOT / "docs/examples/ray_rollouts.py") as recipe:
        lines = recipe.wait().splitlines()
        yield [match.groupdict() for line in lines if (match := SYNC.fullmatch(line))]


def test_every_step_is_a_version(syncs: list[Sync]) -> None:
    assert [sync["version"] for sync in syncs] == [str(n) for n in range(1, 10)]
    assert [sync["kind"] for sync in syncs] == ["full"] + 8 * ["delta"]


def test_the_others_go_on_when_engines_die(syncs: list[Sync]) -> None:
    assert sum(int(sync["lost"]) for sync in syncs) == 2
    assert all(int(sync["receivers"]) > 0 for sync in syncs)


def test_engines_that_start_join_while_syncs_go_on(syncs: list[Sync]) -> None:
    first, *others = syncs
    assert (first["receivers"], first["joined"]) == ("3", "3")
    assert 1 <= sum(int(sync["joined"]) for sync in others) <= 3  # as fast as the machine starts
