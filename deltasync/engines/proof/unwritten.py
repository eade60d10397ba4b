"""What an engine computes with and no sync writes, kept while the engine gives up its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor, nn

from deltasync.engines.proof.reach import Copies, Reach, named


def unwritten(
    model: nn.Module, written: Collection[str], loaded: Collection[int] | None = None
) -> Copies:
    """Copies on the host: constants of kernels, padding, adapters, tensors that no trainer sends.

    Engines that sleep without a copy of their weights bring back no more than registered buffers.
    A full sync writes the weights; the rest would be whatever lay in that memory. Storages are kept
    whole, with all tensors that lie in them.

    Args:
        model: The engine's model, whose memory is still there.
        written: Names of parameters and buffers of which a full sync writes every element.
        loaded: Addresses of the storages that were filled by loading, as of `storages`, if others
            are not given up; None for all.
    """
    filled = defaultdict[int, int](int)  # bytes, by address
    for name, tensor in named(model).items():
        if name in written:
            filled[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    return Copies(
        memory
        for address, memory in storages(model).items()
        if filled[address] < memory.nbytes and (loaded is None or address in loaded)
    )


def storages(model: nn.Module) -> dict[int, Tensor]:
    """uint8[bytes]: the storages of all tensors that are reached from a model, by address.

    Those on the host are left out if some weights are on a GPU.
    """
    left_out = {"meta"}
    if any(one.device.type not in ("cpu", "meta") for one in model.parameters()):
        left_out.add("cpu")
    roots = [one for one in model.named_modules() if not one[0]]  # a mock of a model has none
    aliases = [one.alias for one in Reach(roots).tensors.values()]
    found = {
        one.untyped_storage().data_ptr(): one for one in aliases if one.device.type not in left_out
    }
    return {
        address: torch.empty(0, dtype=torch.uint8, device=one.device).set_(one.untyped_storage())
        for address, one in found.items()
        if one.untyped_storage().nbytes()
    }
