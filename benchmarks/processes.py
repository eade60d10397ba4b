"""Processes of the benchmarks: each runs one of their modules, and is spoken to by lines."""

from __future__ import annotations

import subprocess
import sys


def start(
    module: str, *words: str, is_told: bool = False, own_session: bool = False
) -> subprocess.Popen[str]:
    """Run `module` with `words` as its arguments; stdout is a pipe, and stdin if it `is_told`."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.PIPE if is_told else None,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=own_session,
    )
