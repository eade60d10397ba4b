"""The closed table of element types: wire code, torch name, size. Imports nothing.

Codes are written on the wire: they are never renumbered and never re-used. Elements
are moved and compared as unsigned integers of their size, so that a dtype says
only how many bytes an element has and what it is called.
"""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """One element type.

    Attributes:
        code: Its number on the wire, 1 to 255.
        name: Its name in torch, without the `torch.` prefix.
        item_size: Bytes of one element: 1, 2, 4 or 8.
        is_floating: Whether a wider floating type may be rounded to it.
    """

    code: int
    name: str
    item_size: int
    is_floating: bool


DTYPES: tuple[Dtype, ...] = (
    Dtype(1, "bool", 1, False),
    Dtype(2, "uint8", 1, False),
    Dtype(3, "int8", 1, False),
    Dtype(4, "int16", 2, False),
    Dtype(5, "int32", 4, False),
    Dtype(6, "int64", 8, False),
    Dtype(7, "uint16", 2, False),
    Dtype(8, "uint32", 4, False),
    Dtype(9, "uint64", 8, False),
    Dtype(16, "bfloat16", 2, True),
    Dtype(17, "float16", 2, True),
    Dtype(18, "float32", 4, True),
    Dtype(19, "float64", 8, True),
    Dtype(32, "float8_e4m3fn", 1, True),
    Dtype(33, "float8_e5m2", 1, True),
    Dtype(34, "float8_e4m3fnuz", 1, True),
    Dtype(35, "float8_e5m2fnuz", 1, True),
    Dtype(36, "float8_e8m0fnu", 1, True),
    Dtype(48, "complex64", 8, False),
)

BY_CODE = {dtype.code: dtype for dtype in DTYPES}
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
