"""Takes the device code of other GPUs out of a CUDA library, so that it packs small.

The payloads of entries in the section `.nv_fatbin` are set to zero. Sizes and headers stay as they
are: the driver chooses an entry by its header. Layout of the entries: NVIDIA's `fatbinary.h` names
the outer header; the inner ones are as `cuobjdump` prints them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
_OUTER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes that follow
_INNER = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the payload
_SM_AT = 28  # in an inner header: the compute capability, as 90
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True, slots=True)
class Entry:
    """Device code for one kind of GPU: its payload's place in the library."""

    kind: int
    sm: int
    begin: int
    end: int


def pruned(library: bytes, sm: int) -> bytes:
    """The library with device code for GPUs of this compute capability (90 for Hopper) alone.

    Where a container has machine code for it, that stays. Otherwise the newest PTX that it can
    compile does. Raises ValueError for a library without device code.
    """
    data = bytearray(library)
    begin, end = _section(library, b".nv_fatbin")
    for container in _containers(library, begin, end):
        entries = list(container)
        kept = _kept(entries, sm)
        for entry in entries:
            if (entry.kind, entry.sm) != kept:
                data[entry.begin : entry.end] = bytes(entry.end - entry.begin)
    return bytes(data)


def _kept(entries: list[Entry], sm: int) -> tuple[int, int]:
    if any((entry.kind, entry.sm) == (_CUBIN, sm) for entry in entries):
        return _CUBIN, sm
    return _PTX, max((e.sm for e in entries if e.kind == _PTX and e.sm <= sm), default=0)


def _containers(data: bytes, begin: int, end: int) -> Iterator[Iterator[Entry]]:
    at = begin
    while at + _OUTER.size <= end:
        magic, _, header, length = _OUTER.unpack_from(data, at)
        if magic != _MAGIC:  # between containers, which are aligned to 8 bytes
            at = (at // 8 + 1) * 8
            continue
        yield _entries(data, at + header, at + header + length)
        at += header + length


def _entries(data: bytes, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header, length = _INNER.unpack_from(data, at)
        (sm,) = struct.unpack_from("<I", data, at + _SM_AT)
        yield Entry(kind, sm, at + header, at + header + length)
        at += header + length


def _section(data: bytes, name: bytes) -> tuple[int, int]:
    """(begin, end) of a section of a 64-bit ELF file, by its name."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + n * size) for n in range(count)]
    strings = headers[names][4]
    for header in headers:
        begin = strings + header[0]
        if data[begin : data.index(b"\0", begin)] == name:
            return header[4], header[4] + header[5]
    raise ValueError(f"a library without {name.decode()}")
