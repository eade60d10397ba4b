"""Real processes, killed or stopped at every phase: others are served and nothing is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from deltasync import ModuleSource, ModuleTarget, ReceiverOptions, WeightReceiver, WeightSender
from deltasync.errors import PeerLost, TransportTimeout
from deltasync.testing.processes import Child
from deltasync.transports.base import ReceiveTransport
from tests.worlds.mortals import connect, fingerprint, held, listen, model, serve, step, train

TRANSPORTS = ["shared_memory", "gloo"]
RECEIVER_PHASES = ["begin", "bucket", "prepare", "prepared", "commit", "committed", "finish"]
BEFORE_DECISION = {"begin", "bucket", "prepare", "prepared"}
SENDER_PHASES = ["begin", "bucket", "prepare", "commit", "finish"]


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def last_hash(folder: Path, engine: str) -> object:
    lines = held(folder, engine)
    return lines[-1].get("hash") if lines else None


@pytest.mark.promise("All or nothing", "A receiver killed in any phase costs the others nothing.")
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_receiver_killed_at_any_phase_holds_up_nobody_and_rejoins(
    kind: str, tmp_path: Path
) -> None:
    source = model(0)
    transport = listen(kind, str(tmp_path))
    sender = WeightSender(ModuleSource(source), transport)
    folder = str(tmp_path)
    victims = [
        Child(serve, kind, folder, "victim", 1, phase, f"go-{phase}") for phase in RECEIVER_PHASES
    ]
    last = Child(serve, kind, folder, "victim", 2, "", "go-last")
    try:
        with Child(serve, kind, folder, "survivor", 1, "", ""):
            sender.wait_for_receivers(1, timeout_s=60)
            sender.send_weights(timeout_s=10)
            for number, (phase, victim) in enumerate(zip(RECEIVER_PHASES, victims, strict=True)):
                (tmp_path / f"go-{phase}").touch()
                sender.wait_for_receivers(2, timeout_s=60)
                step(source, number)
                version = sender.version
                stats = sender.send_weights(timeout_s=10)
                assert stats.version == version + 1, phase
                until(lambda: last_hash(tmp_path, "survivor") == fingerprint(source))
                victim.kill()
            (tmp_path / "go-last").touch()
            sender.wait_for_receivers(2, timeout_s=60)
            step(source, 99)
            stats = sender.send_weights(timeout_s=10)
            assert (stats.receivers, stats.full_synced) == (2, 1)
            until(lambda: last_hash(tmp_path, "victim") == fingerprint(source))
            step(source, 100)
            assert sender.send_weights(timeout_s=10).kind == "delta"
            until(lambda: last_hash(tmp_path, "survivor") == fingerprint(source))
            until(lambda: last_hash(tmp_path, "victim") == fingerprint(source))
            assert not [line for line in held(tmp_path, "survivor") if "error" in line]
    finally:
        sender.close()
        for child in (*victims, last):
            child.kill()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_member_killed_within_a_delta_leaves_the_version_to_the_others(
    kind: str, tmp_path: Path
) -> None:
    """Victims join by digest, so that the phase they die in belongs to a delta."""
    source = model(1)
    sender = WeightSender(ModuleSource(source), listen(kind, str(tmp_path)))
    folder = str(tmp_path)
    victims = [Child(serve, kind, folder, f"v-{p}", 1, p, "") for p in RECEIVER_PHASES]
    try:
        with Child(serve, kind, folder, "survivor", 1, "", ""):
            sender.wait_for_receivers(1 + len(victims), timeout_s=90)
            assert sender.send_weights(timeout_s=10).full_synced == 0
            step(source, 1)
            stats = sender.send_weights(timeout_s=10)
            # Who dies with the finish has committed; all others are lost in this sync.
            died = {f"v-{phase}[0/1]" for phase in RECEIVER_PHASES}
            assert died - {"v-finish[0/1]", "v-committed[0/1]"} <= set(stats.lost) <= died
            until(lambda: last_hash(tmp_path, "survivor") == fingerprint(source))
            step(source, 2)
            assert sender.send_weights(timeout_s=10).receivers == 1
            until(lambda: last_hash(tmp_path, "survivor") == fingerprint(source))
    finally:
        sender.close()
        for child in victims:
            child.kill()


@pytest.mark.promise(
    "All or nothing",
    "If one rank of an engine cannot commit, its other ranks put the old version back; other "
    "engines keep the new one.",
)
@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("phase", ["commit", "committed"])
def test_a_rank_killed_after_the_decision_takes_its_engine_back_unless_it_had_committed(
    phase: str, kind: str, tmp_path: Path
) -> None:
    """Its sibling has written the version by then; an engine of one rank keeps it in any case."""
    source, folder = model(1), str(tmp_path)
    sender = WeightSender(ModuleSource(source), listen(kind, folder))

    def rank(number: int, dies_at: str = "", start: str = "") -> Child:
        serve_rank = partial(serve, rank=number, world=2)
        return Child(serve_rank, kind, folder, "pair", 1, dies_at, start)

    sibling, victim, heir = rank(0), rank(1, phase), rank(1, start="go")
    try:
        with Child(serve, kind, folder, "single", 1, "", ""):
            sender.wait_for_receivers(3, timeout_s=60)
            assert sender.send_weights(timeout_s=10).full_synced == 0
            before = fingerprint(source)
            step(source, 1)
            stats = sender.send_weights(timeout_s=10)
            after = fingerprint(source)
            until(lambda: last_hash(tmp_path, "single") == after)
            assert set(stats.lost) <= {"pair[1/2]"}
            if phase == "commit":  # the sibling undoes, and is not named
                assert stats.receivers == 1
                assert "PeerLost" in stats.lost["pair[1/2]"]
                undone = {"error": "SyncAborted", "keeps": before}
                until(lambda: undone in held(tmp_path, "pair[0-2]"))
            else:
                until(lambda: last_hash(tmp_path, "pair[0-2]") == after)
            step(source, 2)
            assert sender.send_weights(timeout_s=10).receivers == 1
            (tmp_path / "go").touch()
            sender.wait_for_receivers(3, timeout_s=60)
            step(source, 3)
            assert sender.send_weights(timeout_s=10).full_synced == 2
            for name in ("single", "pair[0-2]", "pair[1-2]"):
                until(lambda name=name: last_hash(tmp_path, name) == fingerprint(source))  # type: ignore[misc]
            assert not [line for line in held(tmp_path, "single") if "error" in line]
    finally:
        sender.close()
        for child in (sibling, victim, heir):
            child.kill()


@pytest.mark.promise(
    "Time",
    "A receiver that hangs in any phase delays the trainer by one `timeout_s`.",
)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_receiver_that_hangs_holds_the_trainer_up_for_one_timeout(
    kind: str, tmp_path: Path
) -> None:
    """Stopped at every phase of joining and of a delta; the others get each version."""
    source, folder, timeout_s = model(1), str(tmp_path), 1.5
    sender = WeightSender(ModuleSource(source), listen(kind, folder))
    phases = ["layout", *RECEIVER_PHASES]
    victims = [
        Child(serve, kind, folder, f"v-{p}", 1, p, f"go-{p}", signal.SIGSTOP) for p in phases
    ]
    try:
        with Child(serve, kind, folder, "survivor", 1, "", ""):
            sender.wait_for_receivers(1, timeout_s=90)
            sender.send_weights(timeout_s=30)
            for number, phase in enumerate(phases):
                (tmp_path / f"go-{phase}").touch()
                sender.wait_for_receivers(2, timeout_s=60)
                for turn in range(3):  # it joins, takes a delta, and is gone
                    step(source, 10 * number + turn)
                    began = time.monotonic()
                    sender.send_weights(timeout_s=timeout_s)
                    took = time.monotonic() - began
                    assert took < 2 * timeout_s, (phase, turn, took)
                    until(lambda: last_hash(tmp_path, "survivor") == fingerprint(source))
                assert sender.num_receivers == 1, phase
            assert not [line for line in held(tmp_path, "survivor") if "error" in line]
    finally:
        sender.close()
        for child in victims:
            child.kill()


@pytest.mark.promise("All or nothing", "A sender killed in any phase leaves a whole version.")
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_sender_killed_at_any_phase_leaves_the_old_version_and_comes_back(
    kind: str, tmp_path: Path
) -> None:
    replica = model(5)
    receiver = WeightReceiver(
        ModuleTarget(replica),
        _connect_later(kind, str(tmp_path)),
        options=ReceiverOptions(stall_timeout_s=20),
    )
    source = model(0)
    first = 0
    for phase in SENDER_PHASES:
        with Child(train, kind, str(tmp_path), phase, 3, first, 3) as trainer:
            _receive_until_gone(receiver, trainer)
            assert not receiver.is_dirty
            # Versions 1 and 2 came; the third only if it was decided and committed.
            steps = 3 if phase == "finish" else 2
            for number in range(first, first + steps):
                step(source, number)
            assert fingerprint(replica) == fingerprint(source), phase
            first += steps
    with Child(train, kind, str(tmp_path), "", 9, first, 1) as trainer:
        _receive_until_gone(receiver, trainer)
        step(source, first)
        assert fingerprint(replica) == fingerprint(source)
    receiver.close()


def _connect_later(kind: str, folder: str) -> ReceiveTransport:
    if kind == "shared_memory":
        return connect(kind, folder)
    placeholder = listen(kind, folder)  # picks the port that every trainer of the test then uses
    placeholder.close()
    return connect(kind, folder)


def _receive_until_gone(receiver: WeightReceiver, trainer: Child) -> None:
    """Sync until the trainer's process has ended; anything but losing it is an error."""
    received = 0
    deadline = time.monotonic() + 60
    while trainer.is_alive or not received:
        assert time.monotonic() < deadline, "the trainer does not end"
        try:
            receiver.receive_weights(timeout_s=0.2)
            received += 1
        except (PeerLost, TransportTimeout):
            time.sleep(0.01)
