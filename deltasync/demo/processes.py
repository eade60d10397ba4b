"""The two processes: process A starts process B, and both open the same transport."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from deltasync.demo.link import Link
from deltasync.transports.address import Address, listen
from deltasync.transports.base import SendTransport

TransportName = Literal["shared_memory", "gloo"]

MAX_THREADS = 4
EXIT_TIMEOUT_S = 10.0


@contextmanager
def rollout_process() -> Iterator[Link]:
    """Process B and the link to it. It ends with the block, however the block ends.

    B is in a session of its own, so that Ctrl-C reaches A alone; A closes the link, B sees that.
    """
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "deltasync.demo.rollout", str(there.fileno())]
    with there:
        process = subprocess.Popen(command, pass_fds=[there.fileno()], start_new_session=True)
    link = Link(here)
    try:
        yield link
    finally:
        link.close()
        try:
            process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def send_transport(name: TransportName) -> Iterator[tuple[SendTransport, Address]]:
    """The trainer's end of the link that moves weights, and its address."""
    with TemporaryDirectory(prefix="deltasync-") as folder:
        transport, address = listen(name, path=Path(folder) / "weights.sock")
        with transport:
            yield transport, address


def use_few_threads() -> None:
    """The policy is small: more threads than this slow it down."""
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
