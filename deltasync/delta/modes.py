"""torch's modes, which belong to threads: no public call runs in one that its caller has entered.

What is made within `torch.inference_mode()` cannot be written outside of it, for instance by the
next call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Call = TypeVar("_Call", bound=Callable[..., Any])


def plain_mode() -> AbstractContextManager[None]:
    """The context outside inference mode, whose end also restores whether gradients are computed.

    Both ends are in C. So no interrupt leaves the caller in another mode, if the function that it
    calls enters this itself.
    """
    return torch._C._InferenceMode(False)


def in_plain_mode(call: _Call) -> _Call:
    """Have a function run outside inference mode and without gradients."""

    @wraps(call)
    def within(*args: Any, **named: Any) -> Any:
        with plain_mode():
            torch._C._set_grad_enabled(False)
            return call(*args, **named)

    return cast("_Call", within)


def writable(tensor: Tensor) -> Tensor:
    """The same elements, detached, as a tensor that can be written outside inference mode too.

    Call it outside inference mode.
    """
    if not tensor.is_inference():
        return tensor.detach()
    place = (tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)
