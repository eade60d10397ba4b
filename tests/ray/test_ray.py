"""The recipe for Ray, run as it is: what it says of every sync, and of the rollout that dies."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

import pytest

from tests.engines.environment import ROOT
from tests.engines.programs import Program

pytestmark = pytest.mark.timeout(180)

Sync = dict[str, str]
"""The named groups of SYNC; those without a match are empty."""

SYNC = re.compile(
    r"v(?P<version>\d+): (?P<kind>full|delta), (?P<density>[\d.]+)% changed, "
    r"(?P<bytes>\d+) bytes, (?P<receivers>\d+) rollouts hold it"
    r"(, 1 of them by a full sync of (?P<joined_bytes>\d+) bytes)?"
    r"(; lost (?P<lost>[\w-]+)\[0/1\]: PeerLost: .*)?"
)


@pytest.fixture(scope="module")
def lines() -> Iterator[list[str]]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as files:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is left in the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", files)  # a short path: sockets lie in it
        patch.delenv("RAY_ADDRESS", raising=False)
        with Program(ROOT / "docs/examples/ray_rollouts.py") as recipe:
            yield recipe.wait().splitlines()


@pytest.fixture
def syncs(lines: list[str]) -> list[Sync]:
    return [match.groupdict("") for line in lines if (match := SYNC.fullmatch(line))]


def test_every_step_is_a_version(syncs: list[Sync]) -> None:
    assert [sync["version"] for sync in syncs] == [str(n) for n in range(1, 10)]
    assert [sync["kind"] for sync in syncs] == ["full"] + 8 * ["delta"]


def test_the_others_go_on_when_a_rollout_dies(syncs: list[Sync]) -> None:
    [lost] = [sync for sync in syncs if sync["lost"]]
    assert (lost["version"], lost["lost"]) == ("4", "rollout-2")
    assert lost["receivers"] == ("3" if lost["joined_bytes"] else "2")  # if it is back already


def test_a_rollout_that_ray_restarts_joins_by_a_full_sync_for_it_alone(syncs: list[Sync]) -> None:
    [joined] = [sync for sync in syncs if sync["joined_bytes"]]
    assert (joined["kind"], joined["receivers"]) == ("delta", "3")
    assert int(joined["joined_bytes"]) == int(syncs[0]["bytes"])
    assert int(joined["bytes"]) < int(syncs[0]["bytes"]) / 2  # what the others were sent


def test_all_hold_the_trainer_s_bits_at_the_end(lines: list[str]) -> None:
    assert "the trainer and 3 rollouts hold the same bits" in lines
