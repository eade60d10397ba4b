"""The wire format once more, in plain Python integers and `struct`: slow, obvious, independent.

Nothing of `deltasync` is used here, so that what both agree on is what the document says.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MODULUS = 1 << 64
ALIGNMENT, TILE = 16, 4096
SHARE = struct.Struct("<IIQQQQ")


def seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "little")


def mix(key: int, position: int, bits: int) -> int:
    x = (key + position * 0x9E3779B97F4A7C15 + bits) % MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31)


def digest(key: int, positions: Iterable[int], bits: Iterable[int]) -> int:
    return sum(mix(key, i, b) for i, b in zip(positions, bits, strict=True)) % MODULUS


def header(message: bytes, *, payload_bytes: int = 0) -> bytes:
    before = b"DSYN" + struct.pack("<HHI", 2, 0, len(message))
    after = struct.pack("<Q", payload_bytes) + message
    return before + struct.pack("<I", zlib.crc32(before + after)) + after


# Tiles and changes, section 3


def tiles_of(shares: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(share, first element, elements) of each tile of shares of so many (bytes, elements)."""
    order = sorted(range(len(shares)), key=lambda n: shares[n][0])
    return [
        (n, start, min(TILE, shares[n][1] - start))
        for n in order
        for start in range(0, shares[n][1], TILE)
    ]


@dataclass(frozen=True)
class Tile:
    """Changes of one: places and new bits, or all bits if `places` is None."""

    number: int
    places: tuple[int, ...] | None
    bits: tuple[int, ...]


def padded(data: bytes, by: int = ALIGNMENT) -> bytes:
    return data + bytes(-len(data) % by)


def as_is(bits: Iterable[int], item_size: int) -> bytes:
    return b"".join(one.to_bytes(item_size, "little") for one in bits)


def columns(tiles: Sequence[Tile], item_size: int) -> list[bytes]:
    sparse = [(tile.places, tile.bits) for tile in tiles if tile.places is not None]
    places = [place for some, _ in sparse for place in some]
    counts = [0 if tile.places is None else len(tile.places) for tile in tiles]
    whole = [padded(as_is(tile.bits, item_size)) for tile in tiles if tile.places is None]
    return [
        struct.pack(f"<{len(tiles)}I", *(tile.number for tile in tiles)),
        struct.pack(f"<{len(tiles)}H", *counts),
        struct.pack(f"<{len(places)}H", *places),
        as_is((one for _, bits in sparse for one in bits), item_size),
        b"".join(whole),
    ]


def payload(tiles: Sequence[Tile], item_size: int) -> bytes:
    return b"".join(map(padded, columns(tiles, item_size)))


def sizes(tiles: Sequence[Tile], item_size: int) -> dict[str, Any]:
    """What the message of a bucket says of them: fields of its model."""
    _, _, places, _, whole = columns(tiles, item_size)
    numbers = len(tiles), len(places) // 2, len(whole) // item_size
    return {"item_size": item_size} | dict(zip(("tiles", "places", "whole"), numbers, strict=True))


# The codec `gap`, section 4


def gaps(codes: Sequence[int], width: int) -> bytes:
    """Of increasing codes, one or more."""
    most, made = 256**width - 1, list[int]()
    for before, code in zip((codes[0] - 1, *codes), codes, strict=False):
        skipped, rest = divmod(code - before - 1, most)
        made += [most] * skipped + [rest]
    if width == 2:
        made = [one % 256 for one in made] + [one // 256 for one in made]
    return struct.pack("<BQ", width, codes[0]) + bytes(made)


def steps(new: Sequence[int], old: Sequence[int], item_size: int) -> bytes:
    modulus, made, far = 256**item_size, list[int](), b""
    for after, before in zip(new, old, strict=True):
        step = (after - before) % modulus
        zigzag = 2 * step if step < modulus // 2 else 2 * (modulus - step) - 1
        if item_size > 1 and zigzag >= 255:
            zigzag, far = 255, far + after.to_bytes(item_size, "little")
        made.append(zigzag)
    return bytes(made) + far


def streams(
    tiles: Sequence[Tile], item_size: int, old: Callable[[int, int], int], *, width: int = 1
) -> list[bytes]:
    """Of changes to elements that were `old(tile, place)`."""
    codes, near, whole = list[int](), list[tuple[int, int]](), list[tuple[int, int]]()
    for tile in tiles:
        where = range(len(tile.bits)) if tile.places is None else tile.places
        pairs = [(new, old(tile.number, n)) for new, n in zip(tile.bits, where, strict=True)]
        if tile.places is None:
            whole += pairs + [(0, 0)] * (-len(pairs) % (ALIGNMENT // item_size))
        else:
            codes += [TILE * tile.number + place for place in tile.places]
            near += pairs
    numbers = [tile.number for tile in tiles if tile.places is None]
    return [
        struct.pack(f"<{len(numbers)}I", *numbers),
        gaps(codes, width) if codes else b"",
        *(steps([n for n, _ in some], [o for _, o in some], item_size) for some in (near, whole)),
    ]


def coded(made: Sequence[bytes], pack: Callable[[bytes], bytes] = lambda one: one) -> bytes:
    stored = [pack(one) for one in made]
    lengths = [len(one) for pair in zip(made, stored, strict=True) for one in pair]
    return struct.pack("<8Q", *lengths) + b"".join(stored)
