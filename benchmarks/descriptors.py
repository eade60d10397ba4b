"""What a process holds open, by kind: leaks of one kind show, whatever comes and goes beside."""

from __future__ import annotations

import os
import socket
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
            if kind == "socket":
                kind = families.get(inode.rstrip("]")) or _unlisted(int(name))
            found[kind] += 1
    return found


def _unlisted(descriptor: int) -> str:
    """What can be said of a socket that stands in none of the lists: it is not connected."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        return f"unconnected {socket.AddressFamily(copy.family).name}"
    return "socket"


def _inodes(family: str) -> list[str]:
    with suppress(FileNotFoundError):
        lines = Path(f"/proc/self/net/{family}").read_text(encoding="ascii").splitlines()[1:]
        return [line.split()[_FAMILIES[family]] for line in lines]
    return []
