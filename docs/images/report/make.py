"""The picture of a report, of the log of a new demo: `python docs/images/report/make.py`.

It needs chromium. The demo is the small one of the tests, so that it takes a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SIZE = "1100,1560"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        deltasync("demo", "--quick", "--steps", "60", "--out", "run", folder=folder)
        deltasync("report", "run/run.jsonl", folder=folder)
        page = Path(folder, "run", "run.html")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        picture = [f"--window-size={SIZE}", f"--screenshot={HERE / 'report.png'}"]
        command = ["chromium", *options, f"--user-data-dir={folder}/profile", *picture]
        subprocess.run([*command, page.as_uri()], check=True)


def deltasync(*words: str, folder: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "deltasync.cli", *words], cwd=folder, env=environment, check=True
    )


if __name__ == "__main__":
    main()
