"""Codec `gap`: gaps between changed elements, and distances from the old bits, in bytes.

docs/wire-format.md, section 4. All is made for an entropy coder to follow: most bytes are small
numbers of one distribution. A distance is that of two bit patterns as integers, modulo 2^bits: of
floats of one sign it counts neighbours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.delta.changes import Changes
from deltasync.delta.host import Bits
from deltasync.delta.kernels.host import unsigned
from deltasync.delta.tiles import Ints
from deltasync.errors import InvalidIndices, LimitExceeded, TruncatedFrame, WireError
from deltasync.wire.changes import TILE, Sizes
from deltasync.wire.streams import packed, unpacked

Block: TypeAlias = NDArray[np.uint8]

_BLOCK = 1 << 15  # elements worked on at once: temporaries stay in the L2 cache
_ESCAPE = 255  # of steps: the new bits follow
_WIDE = 2  # bytes of a gap
_ESCAPES = {1: 0xFF, _WIDE: 0xFFFF}  # of gaps, by their width: so many more follow
_MOST_GAP = 4  # bytes on average, with escapes: sums of gaps take several times as much memory
_NARROW_UP_TO = 368  # mean gap from which two bytes are shorter than one and its escapes


def encode(changes: Changes, old: Bits, old_whole: Bits) -> bytes | None:
    """The coded form of changes on a host; None if they are so few that gaps are mostly escapes.

    Args:
        changes: What is sent.
        old: unsigned[N]: the bits that its values replace.
        old_whole: unsigned[W]: those that its whole tiles replace; anything in the padding.
    """
    tiles, counts = changes.table()
    places = changes.places.numpy().view(np.uint16)
    whole = tiles[counts == 0].astype("<u4").tobytes()
    codes = np.repeat(tiles * TILE, counts) + places
    if len(codes) and int(codes[-1] - codes[0]) > _ESCAPES[_WIDE] * len(codes):
        return None  # gaps could take over `_MOST_GAP`
    gaps = _encode_gaps(codes) if len(codes) else b""
    steps = (
        _encode_steps(unsigned(new), before)
        for new, before in ((changes.values, old), (changes.whole, old_whole))
    )
    return packed([whole, gaps, *steps])


def decode(data: memoryview, sizes: Sizes, old: Callable[[Changes], tuple[Bits, Bits]]) -> Changes:
    """What `encode` made, over memory of their own.

    Args:
        data: As it came.
        sizes: Of what it stands for.
        old: Checks tiles, counts and places, and returns the bits that such changes replace, as
            `encode` had them.

    Raises:
        WireError: It is not what `encode` makes of any changes. Never another error, unless `old`
            raises one.
    """
    changes = Changes.of(torch.zeros(sizes.num_bytes, dtype=torch.uint8, device="cpu"), sizes)
    whole, gaps, *steps = unpacked(data, sizes.num_bytes)
    if len(whole) % 4 or len(whole) > 4 * sizes.tiles:
        raise TruncatedFrame("numbers of whole tiles in an odd number of bytes, or too many")
    goes_whole = whole.view("<u4").astype(np.int64)
    if (goes_whole[1:] <= goes_whole[:-1]).any():
        raise InvalidIndices("numbers of whole tiles are unsorted or repeated")
    codes = _decode_gaps(gaps, sizes.places)
    tiles, counts = table_of(codes, goes_whole)
    if len(tiles) != sizes.tiles:
        raise InvalidIndices("a coded payload has not as many tiles as its bucket says")
    if tiles[-1] >= 1 << 32:
        raise InvalidIndices("a coded payload names a tile beyond any layout")
    unsigned(changes.tiles)[:] = tiles
    unsigned(changes.counts)[:] = counts
    unsigned(changes.places)[:] = codes % TILE
    for block, before, into in zip(
        steps, old(changes), (changes.values, changes.whole), strict=True
    ):
        unsigned(into)[:] = _decode_steps(block, before)
    return changes


def table_of(codes: NDArray[Any], whole: Ints) -> tuple[Ints, Ints]:
    """int64[T] each: the tiles and counts of some elements, and of tiles that go whole.

    Args:
        codes: int[n], increasing: TILE * tile + place of each element.
        whole: int64[W], increasing: the tiles, whose counts are 0.
    """
    sparse = codes // TILE
    begins = np.flatnonzero(np.diff(sparse, prepend=-1))
    tiles = np.concatenate((sparse[begins].astype(np.int64), whole))
    counts = np.concatenate((np.diff(begins, append=len(sparse)), np.zeros_like(whole)))
    order = np.argsort(tiles, kind="stable")
    return tiles[order], counts[order]


def _encode_gaps(codes: Ints) -> bytes:
    """Of int64[n] strictly increasing numbers, n at least 1, how many lie between each two."""
    is_narrow = int(codes[-1] - codes[0]) < _NARROW_UP_TO * len(codes)
    kind = np.dtype(np.uint8 if is_narrow else "<u2")
    gaps = b"".join(
        _gap_codes(codes[begin : begin + _BLOCK], int(codes[begin - 1]) if begin else None, kind)
        for begin in range(0, len(codes), _BLOCK)
    )
    if not is_narrow:  # all low bytes, then all high ones: they look different
        gaps = np.frombuffer(gaps, np.uint8).reshape(-1, _WIDE).T.tobytes()
    return struct.pack("<BQ", kind.itemsize, int(codes[0])) + gaps


def _gap_codes(codes: Ints, before: int | None, kind: np.dtype[Any]) -> bytes:
    """The largest number says: so many more; the first gap of all is 0."""
    gaps = np.empty_like(codes)
    np.subtract(codes[1:], codes[:-1], out=gaps[1:])
    gaps[0] = 1 if before is None else codes[0] - before
    gaps -= 1
    most = _ESCAPES[kind.itemsize]
    if gaps.max() < most:
        return gaps.astype(kind).tobytes()
    skipped = gaps // most
    gaps -= skipped * most
    skipped += 1
    skipped[0] -= 1
    ends = skipped.cumsum()
    made = np.full(int(ends[-1]) + 1, most, kind)
    made[ends] = gaps.astype(kind)
    return made.tobytes()


def _decode_gaps(block: Block, count: int) -> Ints:
    """int64[count]: strictly increasing numbers. Raises WireError."""
    head = struct.calcsize("<BQ")
    if not count and not len(block):
        return np.zeros(0, np.int64)
    if not count or len(block) < head or block[0] not in _ESCAPES:
        raise WireError("gaps of nothing, or that do not begin with their width")
    if len(block) > head + _MOST_GAP * count:
        raise LimitExceeded(f"gaps of over {_MOST_GAP} bytes for each of {count} places")
    width, first = struct.unpack("<BQ", block[:head].tobytes())
    codes = block[head:]
    if width == _WIDE:
        if len(codes) % _WIDE:
            raise TruncatedFrame("gaps of 2 bytes in an odd number of bytes")
        codes = codes.reshape(_WIDE, -1).T.copy().view("<u2")[:, 0]
    gaps = _gaps(codes, count)
    if codes[0]:
        raise InvalidIndices("the first gap is not 0")
    if first + int(gaps.sum(dtype=np.int64)) + count > 1 << 48:
        raise InvalidIndices("gaps lead beyond any layout")
    found = np.cumsum(gaps, dtype=np.int64)
    found += np.arange(first, first + count)
    return found


def _gaps(codes: NDArray[Any], count: int) -> NDArray[Any]:
    """integer[count]: the number that each ends with, and the escapes before it, together."""
    escape = _ESCAPES[codes.itemsize]
    is_end = codes != escape
    if np.count_nonzero(is_end) != count or not is_end[-1]:  # before memory for that many
        raise InvalidIndices(f"gaps that do not lead to {count} elements")
    if len(codes) == count:
        return codes
    ends = np.flatnonzero(is_end)
    gaps: Ints = np.diff(ends, prepend=-1) - 1
    gaps *= escape
    gaps += codes[ends]
    return gaps


def _encode_steps(new: Bits, old: Bits) -> bytes:
    """How far each of unsigned[n] is from the other one: a byte each; those that are far, after."""
    codes, far = np.empty(len(new), np.uint8), list[bytes]()
    for begin in range(0, len(new), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        steps = zigzag(new[block], old[block])
        if new.itemsize > 1 and steps.max() >= _ESCAPE:
            far.append(new[block][steps >= _ESCAPE].tobytes())
            np.minimum(steps, _ESCAPE, out=steps)
        codes[block] = steps
    return codes.tobytes() + b"".join(far)


def _decode_steps(block: Block, old: Bits) -> Bits:
    """unsigned[n]: what is so far from the other one. Raises WireError."""
    codes, rest = block[: len(old)], block[len(old) :]
    far = np.flatnonzero(codes == _ESCAPE) if old.itemsize > 1 else np.empty(0, np.intp)
    needed = len(old) + len(far) * old.itemsize
    if len(block) != needed:
        raise TruncatedFrame(f"{len(block)} bytes of steps, {needed} are needed")
    new = np.empty_like(old)
    for begin in range(0, len(old), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        new[part] = stepped(codes[part].astype(old.dtype), old[part])
    new[far] = np.frombuffer(rest.tobytes(), old.dtype)
    return new


def zigzag(new: Bits, old: Bits) -> Bits:
    """unsigned[n]: distances 0, -1, 1, -2 ... become 0, 1, 2, 3 ..."""
    steps = new - old
    negative = (steps.view(f"i{steps.itemsize}") >> (8 * steps.itemsize - 1)).view(steps.dtype)
    steps <<= steps.dtype.type(1)
    steps ^= negative
    return steps


def stepped(zigzagged: Bits, old: Bits) -> Bits:
    """unsigned[n]: the inverse of `zigzag`."""
    one = old.dtype.type(1)
    steps: Bits = zigzagged & one
    np.negative(steps, out=steps)
    steps ^= zigzagged >> one
    steps += old
    return steps
