"""Ranks of a test, each in a process of its own."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from deltasync.testing.processes import Child, ChildFailed


def free_port() -> int:
    """A TCP port of this host that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of consecutive TCP ports of this host that nobody listened on a moment ago.

    None of those that the system chooses from, so that no other test gets one meanwhile.
    """
    for first in random.sample(range(10_000, 32_000, 20), 500):
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def run_ranks(
    function: Callable[..., object], world_size: int, *args: Any, timeout_s: float = 60.0
) -> None:
    """Run `function(rank, *args)` in `world_size` processes until all have ended.

    Raises ChildFailed with the traceback of the first rank that raised, or naming the ranks
    that still run after `timeout_s`; no process outlives the call.
    """
    children = [Child(function, rank, *args) for rank in range(world_size)]
    try:
        _wait_all(children, time.monotonic() + timeout_s, timeout_s)
    finally:
        for child in children:
            child.kill()


def _wait_all(children: list[Child], give_up: float, timeout_s: float) -> None:
    while alive := [rank for rank, child in enumerate(children) if child.is_alive]:
        for rank, child in enumerate(children):
            if child.traceback is not None:
                raise ChildFailed(f"rank {rank} raised:\n{child.traceback}")
        if time.monotonic() > give_up:
            raise ChildFailed(f"ranks {alive} still run after {timeout_s} s")
        time.sleep(0.01)
    for child in children:
        child.wait(timeout_s=0)
