"""State digests of numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.delta.kernels import host


def digest_run(bits: NDArray[Any], *, key: int, start: int) -> int:
    """Of consecutive elements, the first at flat position `start`."""
    return host.digest_run(torch.from_numpy(bits), key, start)


def digest_at(positions: NDArray[Any], bits: NDArray[Any], *, key: int) -> int:
    """Of scattered elements, all of one parameter."""
    keys, cuts = np.array([key], np.uint64), np.array([0, len(bits)])
    return int(host.digest_pieces(positions, bits, keys, cuts)[0])
