"""What the forms of 4 bits have in common: E2M1 codes, and two codes in a byte."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.quant.form import Shape


def _before(value: float) -> float:
    """The float32 below."""
    below = torch.nextafter(torch.tensor(value), torch.tensor(-math.inf))
    return below.item()


# Between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. What lies halfway goes to the even code.
_BOUNDS = (0.25, _before(0.75), 1.25, _before(1.75), 2.5, _before(3.5), 5.0)


def check_columns(shape: Shape, block: int, form: str) -> None:
    """Raises ConfigError if rows of a matrix do not consist of whole blocks."""
    if 0 in shape or shape[1] % block:
        raise ConfigError(
            f"{form} is for blocks of {block} in a row, and the shape is {shape}; leave it out of "
            "the forms, as the engine's quantization_config must"
        )


def e2m1(values: Tensor) -> Tensor:
    """uint8 [...]: codes of the nearest E2M1 numbers of float32 [...], ties to even, at most 6.

    Bit 3 is set for what is below 0, also if it is rounded to 0, but not for -0.0. NaN gives 7.
    """
    bounds = torch.tensor(_BOUNDS, device=values.device)
    codes = torch.bucketize(values.abs(), bounds, out_int32=True).to(torch.uint8)
    return codes.add_((values < 0).to(torch.uint8), alpha=8)


def packed(codes: Tensor) -> Tensor:
    """uint8 [rows, cols / 2]: codes below 16 in pairs, the first one in the low bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4
