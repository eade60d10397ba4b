"""Small tensors of a checkpoint that engines do not keep one by one, and that may not change.

Checkpoints of packed codes have the shape of each matrix as a tensor of two integers. Engines load
these of matrices that they fuse into one place, where the last one stays, and turn those of experts
into floats: no route leads there. Nor is one needed as long as all keep their values. So these
tensors are kept beside the engine. They have the values that the engine was started on, and a sync
that brings others fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from deltasync.delta.bits import dtype_of
from deltasync.delta.region import Region
from deltasync.delta.route import Piece
from deltasync.engines.routes.recorder import CheckpointTensor, Recording

Routes = TypeVar("Routes", bound=Recording)
_MOST = 8  # elements of such a tensor


def fixed_in(
    recording: Recording, checkpoint: Sequence[CheckpointTensor]
) -> list[CheckpointTensor]:
    """Small tensors of integers that all go to places that have no route, or become floats.

    What an engine makes of these alone does not change if they do not.
    """
    return [
        one
        for one in checkpoint
        if 0 < one.numel <= _MOST and not one.dtype.is_floating_point
        if (pieces := recording.pieces.get(one.name))
        if recording.dtypes[one.name].is_floating
        or all(piece.live in recording.uncovered for piece in pieces)
    ]


def with_fixed(recording: Routes, fixed: Sequence[CheckpointTensor]) -> Routes:
    """A recording that keeps these tensors beside the engine, as zeros on the host at first."""
    return replace(
        recording,
        pieces={**recording.pieces, **{one.name: (_piece(one),) for one in fixed}},
        given={**recording.given, **{one.name: one.names for one in fixed}},
        dtypes={
            **recording.dtypes,
            **{one.name: dtype_of(torch.empty(0, dtype=one.dtype)) for one in fixed},
        },
        fixed={one.name: torch.zeros(one.shape, dtype=one.dtype, device="cpu") for one in fixed},
    )


def beside(fixed: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of fixed tensors, by the names of the live tensors that routes lead to."""
    return {live_name(name): tensor.to(device, copy=True) for name, tensor in fixed.items()}


def _piece(one: CheckpointTensor) -> Piece:
    every = Region.run(0, one.numel)
    return Piece(live_name(one.name), every, every)


def live_name(name: str) -> str:
    """What a fixed tensor is called beside the engine."""
    return f"{name} (fixed)"
