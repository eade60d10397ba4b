"""An engine's trainer at the end of its process, and in a forked child."""

from __future__ import annotations

from typing import Any

import pytest

from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from tests.worlds.programs import run


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1, 0, "5", None])
def test_times_that_are_none_are_refused_before_anything_else(timeout_s: Any) -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="timeout_s is"):
        EngineSync(nothing, nothing, nothing, timeout_s=timeout_s)
    with pytest.raises(ConfigError, match="timeout_s is"):
        EngineFleet(nothing, nothing, timeout_s=timeout_s)


_WITHIN_ATEXIT = """
import atexit
from typing import Any
from deltasync import DeltaSyncError, ModuleSource, SenderOptions
from deltasync.integrations.engine_sync import EngineSync
from deltasync.transports import collective
from tests.worlds.links import random_model

class Server:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the engine was asked to {name}")

sync = EngineSync(ModuleSource(random_model({"w": (3,)}, 0)), Server(), collective.Sender())

def last() -> None:
    try:
        sync.send_weights(timeout_s=5)
    except DeltaSyncError as error:
        print(type(error).__name__, "atexit" in str(error))
    sync.close()

atexit.register(last)
"""


def test_a_sync_within_atexit_is_refused_before_the_engine_is_asked_for_anything() -> None:
    done = run(_WITHIN_ATEXIT)
    assert done.stdout == "ConfigError True\n", done.stderr


_FORKED = """
import os, sys
from contextlib import contextmanager, suppress
from typing import Any
from deltasync import ModuleSource
from deltasync.errors import TransportClosed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.transports import collective
from tests.worlds.links import random_model

class Server:
    def __getattr__(self, name: str) -> Any:
        print("asked to", name, flush=True)
        raise AssertionError(name)

@contextmanager
def paused():
    try:
        yield
    finally:
        print("resumed by", "parent" if os.getpid() == parent else "child", flush=True)

parent = os.getpid()
source = ModuleSource(random_model({"w": (3,)}, 0))
sync = EngineSync(source, Server(), collective.Sender(), paused=paused)
with suppress(AssertionError):
    sync.connect()  # from now on there may be something to disconnect
sync._pause.begin()  # as while an update is under way
with sync:
    pid = os.fork()
    if pid == 0:
        sync.disconnect()
        try:
            sync.send_weights(timeout_s=5)
        except TransportClosed as error:
            print("forked" in str(error), flush=True)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    sync._pause.end()
"""


@pytest.mark.promise("Children", "A child sends no requests to the engine and does not resume it.")
def test_a_child_asks_nothing_of_the_engine_and_does_not_resume_it() -> None:
    done = run(_FORKED)
    assert done.stdout == "asked to connect\nTrue\nresumed by parent\n", done.stderr
