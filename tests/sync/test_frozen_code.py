"""Engines whose compiled code has the weights as constants are warned of when they join."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FROZEN = """
import logging, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import torch._inductor.config as inductor
from tests.worlds.toy_engines import joined

logging.basicConfig(level=logging.WARNING)
trainer, plain, engine = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64).eval()
x = torch.randn(2, 64)
torch.compile(plain, backend="eager")(x)
with joined(trainer, plain):
    print("no alarm")
compiled = torch.compile(engine)
with torch.no_grad(), inductor.patch(freezing=True):
    compiled(x)
with joined(trainer, engine), torch.no_grad():
    print("stale", not torch.allclose(compiled(x), trainer(x)))
"""
# No process beside it, and no C++ compiler: on a busy machine these take minutes.
WITHOUT_COMPILERS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
WILL_BE = """
import torch._inductor.config
from torch import nn
from tests.worlds.toy_engines import joined

with joined(nn.Linear(8, 8), nn.Linear(8, 8)):
    print("will be")
"""


@pytest.mark.promise(
    "What operators see",
    "An engine whose compiled code has frozen copies of its weights is warned of.",
)
def test_engines_whose_code_is_or_will_be_frozen_are_warned_of() -> None:
    """A setting of the environment holds for all; one of a program, in the thread that made it."""
    cases = [
        (FROZEN, WITHOUT_COMPILERS, "no alarm\nstale True\n"),
        (WILL_BE, {"TORCHINDUCTOR_FREEZING": "1"}, "will be\n"),
    ]
    for program, settings, wanted in cases:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=os.environ | settings,
            timeout=200,
            check=False,
        )
        assert done.stdout == wanted, done.stderr
        assert done.stderr.count("torch.compile freezes these weights") == 1
