"""Whether kernels work on a set of weights, or numpy and torch do, chosen once for the set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Literal

import torch

from deltasync.delta.bits import Live
from deltasync.delta.detector import HostSnapshot
from deltasync.delta.readers import Reader
from deltasync.delta.shard import Share
from deltasync.delta.snapshot import Snapshot, arena
from deltasync.delta.tiles import Space
from deltasync.errors import ConfigError

Kernels = Literal["auto", "triton", "torch"]
"""What compares and writes: Triton's kernels, numpy and torch, or what fits the device best."""


def device_for(
    devices: set[torch.device], numel: int, kernels: Kernels, lives: Iterable[Live] = ()
) -> torch.device | None:
    """Where kernels work on all weights together; None if they do not.

    They do if all weights share a GPU, Triton is installed, and kernels find every element. Raises
    ConfigError if they are demanded ("triton") and cannot.

    Args:
        devices: Where the weights are.
        numel: Their elements.
        kernels: What is asked for.
        lives: Weights that are written.
    """
    types = {device.type for device in devices}
    if kernels == "torch" or (kernels == "auto" and types != {"cuda"}):
        return None
    problem = None
    if find_spec("triton") is None:
        problem = "Triton is not installed"
    elif len(devices) != 1:
        problem = f"the weights live on {len(devices)} devices"
    elif not numel:
        problem = "there are no elements"
    elif types == {"cpu"} and not _is_interpreted():
        problem = "the weights live on a CPU, and TRITON_INTERPRET=1 is not in the environment"
    elif any(live.in_codes and live.spread() is None for live in lives):
        problem = "codes of 4 bits are spread over words in another way in each element"
    if problem is None:
        return devices.pop()
    if kernels == "triton":
        raise ConfigError(f"kernels='triton' is not possible here: {problem}")
    return None


def _is_interpreted() -> bool:
    from deltasync.delta.kernels.triton_base import IS_INTERPRETED

    return IS_INTERPRETED


def snapshot_of(
    shares: Sequence[Share],
    readers: Sequence[Reader],
    *,
    device: torch.device | None = None,
    kernels: Kernels = "auto",
) -> Snapshot:
    """A copy of a source as it is now: what the next delta is taken against.

    Args:
        shares: What there is to send; `shard.whole` makes it of a layout.
        readers: The source of these, in that order.
        device: Where to keep the copy; None for where the source is.
        kernels: What compares.
    """
    space, devices = Space(shares), {reader.device for reader in readers}
    if device is not None and device.type != "cpu":  # kernels reach host memory that is pinned
        devices.add(device)
    where = device_for(devices, int(space.share_numel.sum()), kernels)
    snapshot: Snapshot
    if where is None:
        snapshot = HostSnapshot(space)
    else:
        from deltasync.delta.device import DeviceSnapshot

        is_apart = device is not None and device.type != where.type
        lines = arena(space, device or where, pinned=is_apart)
        snapshot = DeviceSnapshot(space, where, lines)
    snapshot.capture(readers)
    return snapshot
