"""Blocks of rows side by side on a device, in words that kernels read and write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import upload
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.codecs.device_tiles import begins_of
from deltasync.errors import TruncatedFrame

_MARGIN = 4
"""Words behind the last one: a field that begins in it is read as three."""


@dataclass(frozen=True, slots=True)
class Section:
    """The blocks of rows, one after another.

    Attributes:
        words: int32[n], what they have, and a margin.
        data: uint8[n], the same memory.
        bounds: int64[2, rows], where each block begins and ends, in bytes.
    """

    words: Tensor
    data: Tensor
    bounds: Tensor

    @classmethod
    def empty(cls, num_bytes: Ints, device: torch.device) -> Section:
        """Zeros for blocks of so many bytes."""
        number = -(-int(num_bytes.sum()) // 4) + _MARGIN
        words = torch.zeros(number, dtype=torch.int32, device=device)
        bounds = upload([np.stack([begins_of(num_bytes), np.cumsum(num_bytes)])], device)[0]
        return cls(words, words.view(torch.uint8), bounds)

    @classmethod
    def of(cls, data: Tensor, num_bytes: Ints) -> Section:
        """A copy of uint8[n] data. Raises TruncatedFrame if that is not what blocks take."""
        if num_bytes.sum() != len(data):
            raise TruncatedFrame(f"blocks take {num_bytes.sum()} bytes; {len(data)} came")
        section = cls.empty(num_bytes, data.device)
        section.data[: len(data)] = data
        return section
