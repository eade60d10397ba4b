"""The recipe for Ray, run as it is: what it says of every sync, as engines die and are added."""

from __future__ import annotations

import re

import pytest

from tests.engines.environment import ROOT
from tests.engines.programs import Program

SYNC = re.compile(
    r"v(\d+): (full|delta), [\d.]+% of [\d,]+ elements, [\d,]+ bytes, "
    r"(\d+) receivers \((\d+) joined, (\d+) lost\), [\d.]+ ms"
)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_environment")
def test_the_others_go_on_when_engines_die_and_new_ones_join() -> None:
    with Program(ROOT / "docs/examples/ray_rollouts.py") as recipe:
        lines = recipe.wait().splitlines()
    syncs = [match.groups() for line in lines if (match := SYNC.fullmatch(line))]
    assert [(int(version), kind) for version, kind, *_ in syncs] == [
        (number, "delta" if number > 1 else "full") for number in range(1, 32)
    ]
    receivers, joined, lost = zip(*(map(int, sync[2:]) for sync in syncs), strict=True)
    assert (receivers[0], joined[0]) == (3, 3)
    assert min(receivers) > 0
    assert sum(lost) == 2
    assert 1 <= sum(joined[1:]) <= 3  # as fast as the machine starts
