"""Pictures of what commands really print, one SVG each.

    python docs/images/terminal/make.py [NAME...]

Commands run one after another in a new folder, so that later ones find what earlier ones wrote.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
HERE = Path(__file__).parent
COMMANDS = {
    "doctor": "deltasync doctor",
    "demo": "deltasync demo --quick --steps 12 --lr 3e-5 --out run",
}
# Colours as in a terminal, and of what is redrawn the end alone.
TERMINAL = {"COLUMNS": str(WIDTH), "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0"}


def main(*names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, command in COMMANDS.items():
            output = run(command, folder)
            if not names or name in names:
                (HERE / f"{name}.svg").write_text(picture(name, command, output), encoding="utf-8")


def run(command: str, folder: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "deltasync"
    root = str(HERE.parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "deltasync.cli", *arguments],
        cwd=folder,
        env=os.environ | TERMINAL | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def picture(name: str, command: str, output: str) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi(output))
    return console.export_svg(title="deltasync", unique_id=name)


if __name__ == "__main__":
    main(*sys.argv[1:])
