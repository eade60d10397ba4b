"""A group that lost a member leaves nothing behind at the ends that stay.

Each end is a program of its own that does nothing else: what it holds open is the transport's.
"""

import os
import time
from contextlib import ExitStack

import pytest
import torch

from deltasync.transports.process_group import Join, serve_store
from tests.worlds.programs import Program
from tests.worlds.ranks import free_port

SENDER = """
import sys
import torch
from deltasync.errors import DeltaSyncError
from deltasync.testing.links import send_copy
from deltasync.transports.base import Frame
from deltasync.transports.collective import Sender

sender, peers = Sender("127.0.0.1", int(sys.argv[1])), set()
while True:
    peers |= {peer for peer, _ in sender.poll(timeout_s=0.05)}
    sender.open_epoch(sorted(peers), timeout_s=6)
    answers = {}
    try:
        if peers:
            send_copy(sender, Frame(b"x", torch.zeros(1 << 20, dtype=torch.uint8)), timeout_s=6)
            answers = sender.collect_replies(timeout_s=6)
    except DeltaSyncError:
        pass
    peers = {peer for peer in peers if sender.is_connected(peer)}
    print(sum(isinstance(answer, bytes) for answer in answers.values()), flush=True)
"""
RECEIVER = """
import sys
from deltasync.testing.links import echo
from deltasync.transports.collective import Receiver

echo(Receiver("127.0.0.1", int(sys.argv[1])), b"")
"""
DIES_AS_IT_JOINS = f"""
import os, signal
from deltasync.transports import collective_receiver

collective_receiver.Join = lambda *plan, **options: os.kill(os.getpid(), signal.SIGKILL)
{RECEIVER}
"""
KILLS = 2


def await_answers(sender: Program, count: int) -> None:
    """Until a payload was answered by so many."""
    while int(sender.stdout.readline()) != count:
        pass


def lose(sender: Program, port: int, number: int) -> None:
    """Lose a receiver: in a group, or while that is formed."""
    with Program(DIES_AS_IT_JOINS if number % 2 else RECEIVER, str(port)) as doomed:
        if number % 2:
            doomed.wait()
        else:
            await_answers(sender, 2)
            doomed.kill()
    await_answers(sender, 1)


def held(*programs: Program) -> list[int]:
    """How many descriptors and threads each has."""
    folders = [f"/proc/{each.pid}/{kind}" for each in programs for kind in ("fd", "task")]
    return [len(os.listdir(folder)) for folder in folders]


@pytest.mark.slow
def test_receivers_that_are_killed_leave_nothing_at_the_others() -> None:
    port = free_port()
    with ExitStack() as stack:
        ends = [stack.enter_context(Program(end, str(port))) for end in (SENDER, RECEIVER)]
        sender = ends[0]
        for end in ends:
            stack.callback(end.kill)
        await_answers(sender, 1)
        first = held(*ends)
        for number in range(KILLS):
            lose(sender, port, number)
        deadline = time.monotonic() + 100  # a group that was given up ends with its timeout
        now = held(*ends)
        while any(more > less for more, less in zip(now, first, strict=True)):
            assert time.monotonic() < deadline, (first, now)
            await_answers(sender, 1)
            now = held(*ends)


@pytest.mark.gpu
def test_nccl_gives_up_a_member_that_dies_as_it_begins_to_connect() -> None:
    """The interpreter waits for the thread that connects: it would never exit."""
    port, store = serve_store("127.0.0.1", 0)
    store.set("group/here/1", "")  # it came, and will not connect
    join = Join(
        "nccl",
        torch.cuda.Stream("cuda:0"),  # type: ignore[no-untyped-call]
        ("127.0.0.1", port),
        "group",
        rank=0,
        size=2,
        timeout_s=5.0,
        own_host="127.0.0.1",
    )
    join.wait()
    assert join.group is None
    assert join.error is not None
