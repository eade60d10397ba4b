"""What devices find wrong with blocks of `class`, as errors."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.kernels import triton_class_streams as kernels
from deltasync.errors import InvalidIndices, InvalidTable, TruncatedFrame, WireError

_ERRORS = MappingProxyType(
    {
        kernels.SHORT: (TruncatedFrame, "a block ends before its last number"),
        kernels.WRONG: (InvalidTable, "classes, or numbers of a block, outside their limits"),
        kernels.TOTAL: (InvalidIndices, "classes have other changes than their row"),
        kernels.STREAM: (TruncatedFrame, "a block ends before its unary stream"),
        kernels.MANY: (InvalidIndices, "more elements of a class are changed than it has"),
        kernels.ONES_SHORT: (TruncatedFrame, "a unary stream has fewer numbers than belong"),
        kernels.GAP: (InvalidIndices, "a gap between changed elements is longer than their class"),
        kernels.FIELDS_SHORT: (TruncatedFrame, "fields end before the last one"),
        kernels.END: (InvalidIndices, "a changed element lies beyond the end of its class"),
        kernels.LENGTHS_SHORT: (TruncatedFrame, "a unary stream ends before the last length"),
        kernels.QUOTIENT: (InvalidTable, "a quotient over the one of long lengths"),
        kernels.LOW_SHORT: (TruncatedFrame, "fields end before those of the last length"),
        kernels.ONES_LEFT: (TruncatedFrame, "a unary stream has too many bits"),
        kernels.FIELDS_LEFT: (TruncatedFrame, "fields have too many bytes"),
        kernels.LONG: (TruncatedFrame, "a block has other bytes of long lengths than belong"),
    }
)


def note(errors: Tensor, is_wrong: Tensor, code: int) -> None:
    """Lower int64[rows] errors to `code` where bool[rows] says so."""
    torch.minimum(errors, torch.where(is_wrong, code, kernels.SOUND), out=errors)


def check(errors: Ints, *, below: int = kernels.SOUND) -> None:
    """Raise the WireError of the first row that has one below `below`, of all kinds."""
    rows = np.flatnonzero(errors < below)
    if len(rows):
        kind, what = _ERRORS[int(errors[rows[0]])]
        error: WireError = kind(f"row {rows[0]}: {what}")
        raise error
