"""What a process holds open, by kind: leaks of one kind show, whatever comes and goes beside."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

_FAMILIES = {"tcp": 9, "tcp6": 9, "udp": 9, "udp6": 9, "netlink": 9, "unix": 6}
"""The column that holds a socket's inode in /proc/self/net/FAMILY."""


def descriptors() -> Counter[str]:
    """Open descriptors of this process by kind: a family of sockets, a path, a kernel object."""
    families = {inode: family for family in _FAMILIES for inode in _inodes(family)}
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":[")
            found[families.get(inode.rstrip("]"), kind)] += 1
    return found


def _inodes(family: str) -> list[str]:
    with suppress(FileNotFoundError):
        lines = Path(f"/proc/self/net/{family}").read_text(encoding="ascii").splitlines()[1:]
        return [line.split()[_FAMILIES[family]] for line in lines]
    return []
