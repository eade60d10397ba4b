"""The command line: `deltasync COMMAND`, one file per command."""

from __future__ import annotations

import logging
import os
import sys

from deltasync.cli.ending import exit_code
from deltasync.cli.signals import INTERRUPTED, handle_signals, interruption

COMMANDS = {
    "apply": ("deltasync.files.patch_file",),
    "demo": ("deltasync.demo.trainer", "deltasync.demo.report"),
    "diff": ("deltasync.files.patch_file", "deltasync.files.sparsity"),
    "doctor": ("deltasync.cli.probes.checks",),
    "fetch": ("deltasync.store.checkpoints",),
    "log": ("deltasync.store.catalogue",),
    "report": ("deltasync.observe.report",),
    "verify": ("deltasync.files.comparing",),
}
"""By name: each command is a function in a module of this name; these modules it needs first."""


def main() -> None:
    """Run the command that `sys.argv` asks for, and exit with its code."""
    logging.getLogger("deltasync").addHandler(logging.NullHandler())  # commands report themselves
    if sys.stdout is None:  # closed, as some daemons leave it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    handle_signals()
    try:
        from deltasync.cli.app import make_app

        code = make_app(COMMANDS)(prog_name="deltasync", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - it ends the process, whatever it is
        raise SystemExit(exit_code(error)) from None
    sys.exit(INTERRUPTED if interruption.has_come else code)
