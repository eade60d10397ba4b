"""Real processes, killed or stopped at every phase: others are served and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from signal import SIGSTOP

import pytest

from deltasync import ModuleTarget, ReceiverOptions, WeightReceiver
from deltasync.errors import PeerLost, TransportTimeout
from deltasync.testing.processes import Child
from tests.worlds.links import until
from tests.worlds.mortals import Mortals, connect, fingerprint, model, step, train

PHASES = ["begin", "bucket", "prepare", "prepared", "commit", "committed"]
# At which ones receivers hang so that one wait of the trainer is for all of a row.
HANGS = [
    {"x": "layout"},
    {"x": "begin"},
    {"x": "bucket", "y": "prepare"},
    {"x": "prepared", "y": "commit"},
    {"x": "committed"},
]


@contextmanager
def mortals(kind: str, folder: Path) -> Iterator[Mortals]:
    """A trainer, and a receiver that has joined and that nothing happens to."""
    with closing(Mortals(kind, folder)) as here:
        here.start("survivor")
        here.wait(1)
        assert here.sender.send_weights(timeout_s=30).full_synced == 0
        yield here
        here.check("survivor")
        assert not here.errors("survivor")


@pytest.mark.promise("All or nothing", "A receiver killed in any phase costs the others nothing.")
@pytest.mark.parametrize(("kind", "sync"), [("shared_memory", "full"), ("gloo", "delta")])
def test_receivers_killed_at_any_phase_hold_up_nobody_and_rejoin(
    kind: str, sync: str, tmp_path: Path
) -> None:
    """All in the same sync, which is a delta for the survivor."""
    with mortals(kind, tmp_path) as here:
        for phase in PHASES:
            here.start(phase, seed=2 if sync == "full" else 1)
        here.wait(1 + len(PHASES))
        if sync == "delta":
            assert here.send_step().joined == len(PHASES)
        for phase in PHASES:
            here.arm(phase, phase)
        version = here.sender.version
        stats = here.send_step()
        assert stats.version == version + 1
        died = {f"{phase}[0/1]" for phase in PHASES}
        assert died - {"committed[0/1]"} <= set(stats.lost) <= died
        here.check("survivor")
        assert here.send_step().receivers == 1
        until(lambda: not any(here.processes[phase].is_alive for phase in PHASES))
        here.start("commit", seed=2)
        here.wait(2)
        stats = here.send_step()
        assert (stats.receivers, stats.full_synced) == (2, 1)
        assert here.send_step().kind == "delta"
        here.check("commit")


@pytest.mark.promise(
    "Time",
    "A receiver that hangs in any phase delays the trainer by one `timeout_s`.",
)
@pytest.mark.parametrize(("kind", "rows"), [("shared_memory", HANGS), ("gloo", HANGS[2:4])])
def test_receivers_that_hang_hold_the_trainer_up_for_one_timeout(
    kind: str, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    """Stopped at every phase of joining and of a delta; the others get each version."""
    timeout_s, names = 1.5, "xy"
    with mortals(kind, tmp_path) as here:
        for name in names:
            here.start(name, number=SIGSTOP)
        for hangs in rows:
            if "layout" not in hangs.values():
                here.wait(1 + len(names))
                here.send_step()
                here.check(*names)
            for name, phase in hangs.items():
                here.arm(name, phase)
            here.wait(1 + len(names))
            for turn in range(2):  # a delta, and another one if they hang after it
                began = time.monotonic()
                here.send_step(timeout_s=timeout_s)
                took = time.monotonic() - began
                assert took < 2 * timeout_s, (hangs, turn, took)
                here.check("survivor")
            assert here.sender.num_receivers == 1 + len(names) - len(hangs)
            for name in hangs:
                here.processes[name].resume()


@pytest.mark.promise("All or nothing", "A sender killed in any phase leaves a whole version.")
def test_a_sender_killed_at_any_phase_leaves_the_old_version_and_comes_back(
    tmp_path: Path,
) -> None:
    kind, folder, source, replica, first = "shared_memory", str(tmp_path), model(0), model(5), 0
    options = ReceiverOptions(stall_timeout_s=60)
    receiver = WeightReceiver(ModuleTarget(replica), connect(kind, folder), options=options)
    with closing(receiver), ExitStack() as stack:
        for phase in ["begin", "bucket", "prepare", "commit", ""]:
            trainer = stack.enter_context(Child(train, kind, folder, phase, 3, first, 3))
            _receive_until_gone(receiver, trainer)
            assert not receiver.is_dirty
            # Versions 1 and 2 came; the third only if it was decided and committed.
            steps = 2 if phase else 3
            for number in range(first, first + steps):
                step(source, number)
            assert fingerprint(replica) == fingerprint(source), phase
            first += steps


def _receive_until_gone(receiver: WeightReceiver, trainer: Child) -> None:
    """Sync until the trainer's process has ended; anything but losing it is an error."""
    received, deadline = 0, time.monotonic() + 60
    while trainer.is_alive or not received:
        assert time.monotonic() < deadline, "the trainer does not end"
        try:
            receiver.receive_weights(timeout_s=0.2)
            received += 1
        except (PeerLost, TransportTimeout):
            time.sleep(0.01)
