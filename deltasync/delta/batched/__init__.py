"""Comparing, packing and writing all parameters of a model at once, on one GPU.

The Triton kernels see a model as *chunks* (see `delta.digests`): arrays of addresses, positions and
lengths, a few thousand of them, that numpy computes on the host. Neither the number of launches nor
the Python run for a sync grows with the number of parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Literal

import torch

from deltasync.delta.bits import Live
from deltasync.errors import ConfigError

Kernels = Literal["auto", "triton", "torch"]
"""What compares and writes: Triton's kernels, torch's operations, or what fits the device best."""


def device_for_batches(flats: Collection[Live], kernels: Kernels) -> torch.device | None:
    """The device on which these tensors are worked on in batches; None when they are not.

    They are when they share a GPU and Triton is installed. Raises ConfigError when batches are
    demanded ("triton") and not possible.
    """
    devices = {flat.line.device for flat in flats}
    if kernels == "torch" or (kernels == "auto" and {d.type for d in devices} != {"cuda"}):
        return None
    problem = None
    if find_spec("triton") is None:
        problem = "Triton is not installed"
    elif len(devices) != 1:
        problem = f"the weights live on {len(devices)} devices"
    elif not any(flat.numel for flat in flats):
        problem = "there are no elements"
    if problem is None:
        return devices.pop()
    if kernels == "triton":
        raise ConfigError(f"kernels='triton' is not possible here: {problem}")
    return None
