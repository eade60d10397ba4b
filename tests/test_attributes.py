"""Modules that pages name are attributes of the package, before anything imports them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"\bdeltasync((?:\.[A-Za-z_]\w*)+)")
PROGRAM = """
import sys
import deltasync
for name in sys.argv[1:]:
    eval(f"deltasync.{name}", {"deltasync": deltasync})
"""


def test_names_of_pages_are_found_as_they_stand_there() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    found = {name[1:] for page in pages for name in NAMED.findall(page.read_text())}
    modules = {name.partition(".")[0] for name in found}
    assert {"config", "observe", "quant", "store", "sync", "testing", "transports"} <= modules
    usable = {name for name in modules if (ROOT / "deltasync" / name).exists()}
    usable |= {name for name in modules if (ROOT / "deltasync" / f"{name}.py").exists()}
    words = [*sorted(usable - {"cli", "demo"}), "config.network_secret", "config.read_secret"]
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
