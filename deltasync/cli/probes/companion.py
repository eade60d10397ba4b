"""Processes that end when the process that started them ends, however that happens.

`python -m deltasync.cli.probes.companion MODULE WORDS` calls `main` of MODULE, and ends the
process as soon as standard input is closed: a pipe from the process that called `start_companion`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib import import_module
from typing import IO, Any


def start_companion(
    module: str, *words: str, stderr: IO[bytes], **settings: Any
) -> subprocess.Popen[bytes]:
    """Run `main` of `module` in a process that ends at the latest with this one or the `Popen`.

    The system closes the pipe if this process is killed, even during the fork.

    Args:
        module: Imported there; its `main` reads `words` as `sys.argv[1:]`.
        words: Those arguments.
        stderr: Where the process writes errors.
        settings: Further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "deltasync.cli.probes.companion", module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        **settings,
    )


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the pipe is closed: nothing is written to it
    os._exit(1)


def main() -> None:
    """Watch the pipe first: imports take seconds."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    del sys.argv[0]
    import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
