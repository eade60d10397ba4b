"""Pictures of what commands really print, one SVG each.

    python docs/images/terminal/make.py [NAME...]

Commands run one after another in a new folder, so that later ones find what earlier ones wrote.
They write to a terminal of their own; what they say of progress on stderr is no part of a picture.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
HERE = Path(__file__).parent
COMMANDS = {
    "doctor": ["deltasync doctor"],
    "demo": ["deltasync demo --out run"],
    "diff": ["deltasync diff run/first.safetensors run/last.safetensors --out run/step.patch"],
    "verify": [
        "deltasync apply run/step.patch run/first.safetensors --out run/made.safetensors",
        "deltasync verify run/last.safetensors run/made.safetensors",
        "deltasync verify run/first.safetensors run/made.safetensors",
    ],
}
"""Those of one picture. Codes of 1 are taken as they come: the last `verify` finds differences."""
# Of what is redrawn the end alone.
TERMINAL = {"COLUMNS": str(WIDTH), "TERM": "xterm-256color", "TTY_INTERACTIVE": "0"}


def main(*names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, commands in COMMANDS.items():
            outputs = [run(command, folder) for command in commands]
            if not names or name in names:
                drawn = picture(name, commands, outputs)
                (HERE / f"{name}.svg").write_text(drawn, encoding="utf-8")


def run(command: str, folder: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "deltasync"
    root = str(HERE.parents[2])
    reader, writer = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "deltasync.cli", *arguments],
        cwd=folder,
        env=os.environ | TERMINAL | {"PYTHONPATH": root},
        stdout=writer,
    ) as process:
        os.close(writer)
        output = read_all(reader)
    assert process.returncode in (0, 1), command
    return output


def read_all(terminal: int) -> str:
    """What is written to it until nobody can write any more, which Linux tells by EIO."""
    output = b""
    with open(terminal, "rb", buffering=0) as file, suppress(OSError):
        while part := file.read(1 << 16):
            output += part
    return output.decode().replace("\r\n", "\n")


def picture(name: str, commands: list[str], outputs: list[str]) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for command, output in zip(commands, outputs, strict=True):
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(output))
    return console.export_svg(title="deltasync", unique_id=name)


if __name__ == "__main__":
    main(*sys.argv[1:])
