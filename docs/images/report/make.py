"""The charts of a report, of the log of a new demo: `python docs/images/report/make.py`.

The demo is the small one of the tests, so that it takes a minute.
"""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.image import imread, imsave

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        deltasync("demo", "--quick", "--steps", "60", "--out", "run", folder=folder)
        deltasync("report", "run/run.jsonl", folder=folder)
        page = Path(folder, "run", "run.html").read_text(encoding="utf-8")
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    charts = [imread(io.BytesIO(base64.b64decode(one))) for one in pictures]
    imsave(HERE / "report.png", np.concatenate(charts))


def deltasync(*words: str, folder: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "deltasync.cli", *words], cwd=folder, env=environment, check=True
    )


if __name__ == "__main__":
    main()
