"""A kernel in Triton that chooses classes of rows: which runs of keys, and their parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.codecs.class_keys import MAX_CLASSES

_MAX = tl.constexpr(MAX_CLASSES)


@triton.jit
def choose_classes(
    few, many, costs, windows, lanes, classes, num_classes, parameters,
    COST: tl.constexpr, KEYS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Begin classes so that the sum of their costs is least: `class_keys.divide`.

    Args:
        few, many: float64[rows, 65], how many are chosen, and how many there are, of the keys of a
            row's window before each.
        costs: float64[rows, 65, PARAMETERS], bits of their lengths with each parameter.
        windows, lanes: int64[rows], the first key told apart; over how many lanes counts are
            written, or 0.
        classes: uint8[rows, KEYS], the classes of all keys.
        num_classes: int64[rows].
        parameters: int64[rows, 64], the best of each class.
        COST: Bits of a class.
    """
    row = tl.program_id(0)
    first, place = tl.arange(0, _MAX), tl.arange(0, PARAMETERS)
    few, many = few + row * (_MAX + 1), many + row * (_MAX + 1)
    costs += row * (_MAX + 1) * PARAMETERS
    chosen_before, all_before = tl.load(few + first), tl.load(many + first)
    costs_before = tl.load(costs + first[:, None] * PARAMETERS + place[None, :])
    each = tl.load(lanes + row).to(tl.float64)
    least = tl.where(first == 0, 0.0, float("inf")).to(tl.float64)
    begin = tl.zeros([_MAX], tl.int32)
    for stop in range(1, _MAX + 1):
        chosen = tl.load(few + stop) - chosen_before
        found = tl.load(many + stop) - all_before
        share = tl.minimum(tl.maximum(chosen / tl.maximum(found, 1.0), 1e-6), 1 - 1e-6)
        bits = -(chosen * tl.log2(share) + (found - chosen) * tl.log2(1 - share))
        fewer = tl.maximum(tl.minimum(chosen, found - chosen), 0.0)
        bits += each * tl.log2(1 + 4 * tl.sqrt(fewer / tl.maximum(each, 1.0)))
        lengths = tl.load(costs + stop * PARAMETERS + place)[None, :] - costs_before
        bits = tl.maximum(bits, 0.0) + tl.min(lengths, axis=1) + COST
        ways = tl.where(first < stop, least + bits, float("inf"))
        best = tl.min(ways, axis=0)
        at = tl.min(tl.where(ways == best, first, _MAX), axis=0)
        least = tl.where(first == stop, best, least)
        begin = tl.where(first == stop - 1, at, begin)
    window = tl.load(windows + row)
    key = tl.arange(0, KEYS)
    kinds, count = tl.zeros([KEYS], tl.int32), tl.full((), 0, tl.int32)
    stop = tl.full((), _MAX, tl.int32)
    while stop > 0:
        stop = tl.sum(tl.where(first == stop - 1, begin, 0))
        kinds += ((stop > 0) & (key >= window + stop)).to(tl.int32)
        count += 1
    tl.store(classes + row * KEYS + key, kinds.to(tl.uint8))
    tl.store(num_classes + row, count.to(tl.int64))
    stop = tl.full((), _MAX, tl.int32)
    while stop > 0:
        start = tl.sum(tl.where(first == stop - 1, begin, 0))
        lengths = tl.load(costs + stop * PARAMETERS + place)
        lengths -= tl.load(costs + start * PARAMETERS + place)
        best = tl.min(lengths, axis=0)
        parameter = tl.min(tl.where(lengths == best, place, PARAMETERS), axis=0)
        count -= 1
        tl.store(parameters + row * _MAX + count, parameter.to(tl.int64))
        stop = start
