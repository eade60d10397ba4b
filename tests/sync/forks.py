"""Both ends of a link in processes of their own, one of which forks in the middle.

The end that a mode names does: in "train-ends" it is the trainer, whose child ends as programs do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
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
from deltasync.transports import collective, shared_memory
from deltasync.transports.base import ReceiveTransport, SendTransport
from tests.worlds.links import Model, random_model
from tests.worlds.mortals import fingerprint

LIVES_S = 40.0
LIMIT_S = 40.0


def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def forked(folder: Path, child: Callable[[], object]) -> bool:
    """Fork; whether this is the child, which has done `child`. The parent waits for its end."""
    pid = os.fork()
    if pid == 0:
        child()
        return True
    wait_for(pid)
    return False


def wait_for(pid: int) -> None:
    found: list[int] = []

    def is_over() -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        found.extend([status] if ended else [])
        return bool(ended)

    until(is_over)
    assert found == [0], f"the child ended with {found}"


def refused(call: Callable[[], object]) -> None:
    """`call` must raise TransportClosed, at once."""
    with within(PROMPT_S), pytest.raises(TransportClosed, match="forked"):
        call()


def live_on() -> None:
    time.sleep(LIVES_S)
    os._exit(0)


def fork_as(mode: str, folder: Path, use: Callable[[], None]) -> bool:
    """Whether this process is a child, which is to end as programs do."""
    match mode:
        case "ends":
            return forked(folder, use)
        case "exits":
            forked(folder, lambda: os._exit(0))

            def use_and_exit() -> None:
                use()
                os._exit(0)

            forked(folder, use_and_exit)
        case "loads":
            for _ in range(2):
                data = TensorDataset(torch.zeros(8, 1))
                assert (
                    len(list(DataLoader(data, num_workers=2, multiprocessing_context="fork"))) == 8
                )
        case "outlives":
            if os.fork() == 0:
                live_on()
            os.kill(os.getpid(), signal.SIGKILL)
        case "starts":
            program = [sys.executable, "-c", f"import time; time.sleep({LIVES_S})"]
            subprocess.Popen(program, close_fds=False)
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise AssertionError(mode)
    return False


def listen(kind: str, folder: Path) -> SendTransport:
    if kind == "shared_memory":
        return shared_memory.Sender(folder / "socket")
    sender = collective.Sender()
    Path(folder, "port.new").write_text(str(sender.address[1]))
    Path(folder, "port.new").rename(folder / "port")
    return sender


def connect(kind: str, folder: Path) -> ReceiveTransport:
    if kind == "shared_memory":
        return shared_memory.Receiver(folder / "socket")
    until((folder / "port").exists)
    return collective.Receiver("127.0.0.1", int((folder / "port").read_text()))


def model(seed: int) -> Model:
    return random_model({"a": (300, 70), "b": (41,)}, seed)


def train(kind: str, folder: Path, mode: str) -> None:
    source = model(0).requires_grad_(True)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    sender = WeightSender(ModuleSource(source), listen(kind, folder))
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
        is_due = number == 2 and mode.startswith("train-")  # a sync is under way meanwhile
        if is_due and fork_as(mode.removeprefix("train-"), folder, use):
            return
        hook.wait()
        assert hook.failures == 0
        if number == 2 and mode.startswith("serve-"):
            (folder / "fork").touch()
            if mode in ("serve-outlives", "serve-starts"):
                time.sleep(1)  # it dies, and the next step is told
            else:
                until((folder / "forked").exists)
    assert hook.syncs == 4
    (folder / "partial").write_text(fingerprint(source))
    (folder / "partial").rename(folder / "trained")  # which is read as soon as it exists
    until((folder / "served").exists)
    hook.remove()
    sender.close()


def serve(kind: str, folder: Path, mode: str) -> None:
    replica = model(1)
    receiver = WeightReceiver(ModuleTarget(replica), connect(kind, folder))

    def use() -> None:
        refused(staging.is_staged)
        receiver.invalidate()
        refused(lambda: receiver.receive_weights(timeout_s=5))
        receiver.close()

    is_forked = False
    with StagingThread(receiver) as staging:
        while receiver.version != 4:
            if staging.wait_staged(timeout_s=0.1):
                staging.commit()
            error = staging.last_error
            if error is not None and not isinstance(error, TransportTimeout):  # it has begun late
                (folder / "noticed").touch()
                return
            if mode.startswith("serve-") and not is_forked and (folder / "fork").exists():
                is_forked = True
                if fork_as(mode.removeprefix("serve-"), folder, use):
                    return
                (folder / "forked").touch()
    until((folder / "trained").exists)
    assert fingerprint(replica) == (folder / "trained").read_text()
    (folder / "served").touch()
    receiver.close()


def take_part(end: str, kind: str, folder: Path, mode: str) -> None:
    """One end, in a process of its own; a child that it forks and that ends does so here."""
    os.setsid()  # so that the test can kill what is left of it and of its children
    (folder / f"{end}.pid").write_text(str(os.getpid()))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    me = os.getpid()
    try:
        {"train": train, "serve": serve}[end](kind, folder, mode)
    except BaseException:
        if os.getpid() != me:
            traceback.print_exc()
            os._exit(1)
        raise
    if os.getpid() != me:
        ctypes.pythonapi.Py_Exit(0)  # as a program ends that was not begun by multiprocessing
