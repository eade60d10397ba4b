"""An engine's trainer at the end of its process."""

from __future__ import annotations

import subprocess
import sys

_WITHIN_ATEXIT = """
import atexit
from typing import Any
from deltasync import DeltaSyncError, ModuleSource, SenderOptions
from deltasync.integrations.engine_sync import EngineSync
from deltasync.transports import collective
from tests.sync.harness import random_model

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
    done = subprocess.run(
        [sys.executable, "-c", _WITHIN_ATEXIT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ConfigError True\n", done.stderr
