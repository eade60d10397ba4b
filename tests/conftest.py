"""Hypothesis profiles, and skipping of what this machine has no device for."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

for _name, _examples in {"dev": 50, "ci": 200, "nightly": 5000}.items():
    # No deadline: the first example pays for lazy imports, and shared machines stall.
    settings.register_profile(_name, max_examples=_examples, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined

DEVICES_NEEDED = {"gpu": 1, "multigpu": 2}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, needed in DEVICES_NEEDED.items():
        if item.get_closest_marker(marker) and torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA device(s)")
