"""Classes of elements by their old bits: what `class` predicts changes from.

An element's *key* is the exponent of its old value. A *class* is a run of keys; an encoder chooses
the runs for each row, and writes where they begin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.dtypes import Dtype
from deltasync.errors import InvalidTable
from deltasync.files.classes.bitstream import Bits, Bytes, Ints
from deltasync.files.classes.streams import ByteReader, varints

MAX_CLASSES = 64

_EXPONENTS = {  # mantissa and exponent bits
    "bfloat16": (7, 8),
    "float16": (10, 5),
    "float32": (23, 8),
    "float64": (52, 11),
    "float8_e4m3fn": (3, 4),
    "float8_e4m3fnuz": (3, 4),
    "float8_e5m2": (2, 5),
    "float8_e5m2fnuz": (2, 5),
    "float8_e8m0fnu": (0, 8),
    "uint8": (4, 4),
    "int8": (4, 4),
}
_NONE = (0, 0)  # integers whose values predict nothing: one class

Costs = NDArray[np.float64]
Keys = NDArray[Any]


def num_keys(dtype: Dtype) -> int:
    """How many keys its elements can have."""
    return 1 << key_field(dtype)[1]


def key_field(dtype: Dtype) -> tuple[int, int]:
    """(the lowest bit of an element's key, how many bits it has)."""
    return _EXPONENTS.get(dtype.name, _NONE)


def keys(bits: Bits, dtype: Dtype) -> Keys:
    """uint8 or uint16[n]: the keys of unsigned[n] bits."""
    low, high = key_field(dtype)
    number = bits.dtype.type
    found: Keys = (bits >> number(low)) & number((1 << high) - 1)
    return found.astype(np.uint8 if high <= 8 else np.uint16)


def table(firsts: list[int], dtype: Dtype) -> Bytes:
    """uint8[keys]: the class of each key, of classes that begin at increasing `firsts`."""
    classes = np.zeros(num_keys(dtype), np.uint8)
    np.add.at(classes, firsts[1:], 1)
    return np.cumsum(classes, dtype=np.uint8)


def write_firsts(firsts: list[int]) -> bytes:
    """The number of classes, and how many keys each but the last has."""
    return varints(len(firsts), *np.diff(firsts).tolist())


def read_firsts(block: ByteReader, dtype: Dtype) -> list[int]:
    """Reads back what `write_firsts` wrote. Raises WireError."""
    count = block.varint()
    if not 1 <= count <= MAX_CLASSES:
        raise InvalidTable(f"{count} classes; a row has 1 to {MAX_CLASSES}")
    firsts = [0]
    for _ in range(count - 1):
        firsts.append(firsts[-1] + block.varint())
    if firsts[-1] >= num_keys(dtype) or len(set(firsts)) < count:
        raise InvalidTable(f"classes of {dtype.name} cannot begin at keys {firsts}")
    return firsts


def divide(cost: Costs) -> list[int]:
    """Where to begin classes so that the sum of their costs is least.

    Args:
        cost: float64[keys + 1, keys + 1], of one class of the keys [i, j).
    """
    least, begin = np.zeros(len(cost)), np.zeros(len(cost), np.int64)
    for stop in range(1, len(cost)):
        ways = least[:stop] + cost[:stop, stop]
        begin[stop] = np.argmin(ways)
        least[stop] = ways[begin[stop]]
    firsts = [int(begin[-1])]
    while firsts[0]:
        firsts.insert(0, int(begin[firsts[0]]))
    return firsts


def window(found: Ints) -> tuple[int, int]:
    """The run of at most MAX_CLASSES keys, [begin, end), that classes are told apart in.

    Args:
        found: int64[keys], elements of each. Keys outside the run go with its first or last one.
    """
    used = np.flatnonzero(found)
    end = int(used[-1]) + 1 if len(used) else 1
    return max(int(used[0]) if len(used) else 0, end - MAX_CLASSES), end


def spans(counts: NDArray[Any]) -> NDArray[Any]:
    """[n + 1, n + 1, ...]: sums of counts[n, ...] over every run of keys [i, j)."""
    ends = np.concatenate([np.zeros((1, *counts.shape[1:]), counts.dtype), np.cumsum(counts, 0)])
    sums: NDArray[Any] = ends[None] - ends[:, None]
    return sums


def entropy(chosen: Costs, of: Costs) -> Costs:
    """Bits that it takes to say which ones are chosen, if all are as likely."""
    share = np.clip(chosen / np.maximum(of, 1), 1e-12, 1 - 1e-12)
    bits = -(chosen * np.log2(share) + (of - chosen) * np.log2(1 - share))
    return np.maximum(bits, 0)
