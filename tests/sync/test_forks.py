"""Children that are forked beside a sync: parents go on, and are dead when they are dead."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from deltasync import (
    ModuleSource,
    ModuleTarget,
    StagingThread,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import TransportClosed, TransportTimeout
from deltasync.testing.links import PROMPT_S, within
from deltasync.testing.processes import Child, ChildFailed
from tests.worlds.links import Model, random_model, until
from tests.worlds.mortals import connect, fingerprint, listen

KINDS = ["shared_memory", "gloo"]
ENDS = ["train", "serve"]
LIMIT_S = 40.0


@pytest.mark.promise(
    "Children",
    "A forked child that closes, exits or loads data affects neither end; its own calls raise "
    "`TransportClosed`.",
)
@pytest.mark.parametrize("kind", KINDS)
def test_children_that_close_exit_or_load_data_disturb_nobody(kind: str, tmp_path: Path) -> None:
    """Neither those of the trainer, in a sync, nor those of the engine, between two."""
    with both(kind, "", tmp_path) as ends:
        for process in ends.values():
            process.wait(timeout_s=80)
        assert not (tmp_path / "noticed").exists()


@pytest.mark.promise(
    "Children",
    "A child or a program that keeps running keeps no connection of a dead process open.",
)
@pytest.mark.parametrize(("kind", "end"), list(zip(KINDS, ENDS, strict=True)))
def test_a_child_that_lives_on_keeps_no_dead_end_alive(kind: str, end: str, tmp_path: Path) -> None:
    with both(kind, end, tmp_path) as ends:
        until(lambda: not ends[end].is_alive)
        died = time.monotonic()
        assert ends[end].traceback is None
        if end == "train":
            ends["serve"].wait(timeout_s=10)
            assert (tmp_path / "noticed").exists()
        else:
            with pytest.raises(ChildFailed, match=r"StepApplied.*(disconnected|PeerLost)"):
                ends["train"].wait(timeout_s=10)
        assert time.monotonic() - died < 10


@contextmanager
def both(kind: str, dies: str, folder: Path) -> Iterator[dict[str, Child]]:
    """Both ends; whatever is left of them and of their children is killed at the end.

    The end `dies` does so in the middle, and leaves a child and a program; if there is none, both
    ends have children that do things and end.
    """
    with ExitStack() as stack:
        ends = {end: stack.enter_context(Child(take_part, end, kind, folder, dies)) for end in ENDS}
        try:
            yield ends
        finally:
            for path in folder.glob("*.pid"):
                with suppress(ProcessLookupError):
                    os.killpg(int(path.read_text()), signal.SIGKILL)


def take_part(end: str, kind: str, folder: Path, dies: str) -> None:
    """One end, in a process of its own; a child that it forks and that ends does so here."""
    os.setsid()  # so that the test can kill what is left of it and of its children
    (folder / f"{end}.pid").write_text(str(os.getpid()))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    me = os.getpid()
    try:
        {"train": train, "serve": serve}[end](kind, folder, dies)
    except BaseException:
        if os.getpid() != me:
            traceback.print_exc()
            os._exit(1)
        raise
    if os.getpid() != me:
        ctypes.pythonapi.Py_Exit(0)  # as a program ends that was not begun by multiprocessing


def train(kind: str, folder: Path, dies: str) -> None:
    source = model(0).requires_grad_(True)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    sender = WeightSender(ModuleSource(source), listen(kind, str(folder)))
    sender.wait_for_receivers(1)
    hook = sync_after_step(optimizer, sender, on_busy="wait", on_error="raise", timeout_s=LIMIT_S)

    def step() -> None:
        for weights in source.parameters():
            weights.grad = torch.ones_like(weights)
        optimizer.step()

    def use() -> None:
        step()
        hook.wait()
        hook.remove()
        refused(sender.send_weights)
        refused(lambda: sender.wait_for_receivers(1))
        sender.close()

    for number in range(4):
        step()
        if number == 2 and forks("train", dies, use):  # a sync is under way meanwhile
            return
        hook.wait()
        assert hook.failures == 0
        if number == 2:
            (folder / "fork").touch()
            until((folder / "forked").exists)
            if dies:
                time.sleep(1)  # it dies, and the next step is told
    assert hook.syncs == 4
    (folder / "partial").write_text(fingerprint(source))
    (folder / "partial").rename(folder / "trained")  # which is read as soon as it exists
    until((folder / "served").exists)
    hook.remove()
    sender.close()


def serve(kind: str, folder: Path, dies: str) -> None:
    replica = model(1)
    receiver = WeightReceiver(ModuleTarget(replica), connect(kind, str(folder)))

    def use() -> None:
        refused(staging.is_staged)
        receiver.invalidate()
        refused(lambda: receiver.receive_weights(timeout_s=5))
        receiver.close()

    with StagingThread(receiver) as staging:
        while receiver.version != 4:
            if staging.wait_staged(timeout_s=0.1):
                staging.commit()
            error = staging.last_error
            if error is not None and not isinstance(error, TransportTimeout):  # it has begun late
                (folder / "noticed").touch()
                return
            if (folder / "fork").exists() and not (folder / "forked").exists():
                if dies:
                    (folder / "forked").touch()
                if forks("serve", dies, use):
                    return
                (folder / "forked").touch()
    until((folder / "trained").exists)
    assert fingerprint(replica) == (folder / "trained").read_text()
    (folder / "served").touch()
    receiver.close()


def model(seed: int) -> Model:
    return random_model({"a": (300, 70), "b": (41,)}, seed)


def refused(call: Callable[[], object]) -> None:
    """`call` must raise TransportClosed, at once."""
    with within(PROMPT_S), pytest.raises(TransportClosed, match="forked"):
        call()


def forks(end: str, dies: str, use: Callable[[], None]) -> bool:
    """Do what the end is to do in the middle; whether this is a child, to end as programs do."""
    if dies == end:
        if os.fork() == 0:
            time.sleep(LIMIT_S)
            os._exit(0)
        program = [sys.executable, "-c", f"import time; time.sleep({LIMIT_S})"]
        subprocess.Popen(program, close_fds=False)
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        return False
    is_child = forked(lambda: os._exit(0))
    data = TensorDataset(torch.zeros(8, 1))
    assert len(list(DataLoader(data, num_workers=2, multiprocessing_context="fork"))) == 8
    return is_child or forked(use)


def forked(child: Callable[[], object]) -> bool:
    """Fork; whether this is the child, which has done `child`. The parent waits for its end."""
    pid = os.fork()
    if pid == 0:
        child()
        return True
    found: list[int] = []

    def is_over() -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        found.extend([status] if ended else [])
        return bool(ended)

    until(is_over, timeout_s=LIMIT_S)
    assert found == [0], f"the child ended with {found}"
    return False
