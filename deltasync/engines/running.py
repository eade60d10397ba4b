"""How an engine's own code is run, and which of its errors go to who asked for that."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deltasync.delta.memory import is_lack_of_memory

_Call = TypeVar("_Call", bound=Callable[..., Any])
_AMOUNT = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_ABSURD = 1 << 46  # bytes: no machine has them


def as_made(module: nn.Module | None, call: _Call) -> _Call:
    """Have an engine's code run in inference mode if the engine was made in it, to write to it."""
    tensors = () if module is None else chain(module.parameters(), module.buffers())
    return torch.inference_mode()(call) if any(map(Tensor.is_inference, tensors)) else call


def raise_lack_of_memory(error: BaseException) -> None:
    """Raise an error again that code raised on values that are tried, if it is a lack of memory.

    A tensor that no machine could hold is none: its size was computed of values without sense.
    """
    asked = _AMOUNT.search(str(error))
    is_absurd = asked is not None and float(asked[1]) * _UNITS[asked[2].lower()] >= _ABSURD
    if is_lack_of_memory(error) and not is_absurd:
        raise error
