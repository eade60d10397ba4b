"""What the forms of 4 bits have in common: E2M1 codes, and two codes in a byte."""

from __future__ import annotations

import torch
from torch import Tensor


def e2m1(values: Tensor) -> Tensor:
    """uint8 [...]: codes of the nearest E2M1 numbers of float32 [...], ties to even, at most 6.

    The numbers are 0, 0.5, 1, 1.5, 2, 3, 4 and 6: in steps of 0.5 to 2, of 1 to 4, and of 2. The
    least of three roundings is right: a step gives more elsewhere. Bit 3 is set below 0, also if
    it is rounded to 0, but not for -0.0. NaN gives 7. `values` is overwritten.
    """
    signs, size = (values < 0).view(torch.uint8), values.abs_()
    codes = torch.round(size).add_(2)
    torch.minimum(codes, (size * 2).round_(), out=codes)
    torch.minimum(codes, size.div_(2).round_().add_(4), out=codes)
    codes = codes.clamp_(max=7).nan_to_num_(7).to(torch.uint8)
    return codes.add_(signs, alpha=8)


def packed(codes: Tensor) -> Tensor:
    """uint8 [rows, cols / 2]: codes below 16 in pairs, the first one in the low bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4
