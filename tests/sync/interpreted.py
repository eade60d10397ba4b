"""What tests of kernels need that run in several threads where Triton interprets them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from deltasync.delta.kernels import tiles

INTERPRETED_S = 240.0
"""Seconds for a wait in which kernels are interpreted: seconds alone, minutes on a busy machine."""


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps its state in globals, and here both ends are threads.

    Nor do several threads of Python 3.11 parse at once without fail: gh-106905.
    """
    if torch.cuda.is_available():
        return
    turn, run = threading.Lock(), InterpretedFunction.run

    def in_turn(*args: Any, **kwargs: Any) -> None:
        with turn:
            run(*args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", in_turn)
    for span in ("SPAN", "BOX_SPAN"):  # few programs: each takes long
        monkeypatch.setattr(tiles, span, tiles.TILE.value)
