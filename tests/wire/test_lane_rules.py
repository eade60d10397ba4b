"""Rules W19, W20 and W26 of docs/wire-format.md: lanes of a trainer's ranks, and the two tables.

What a receiver refuses by its table is in tests/sync/test_bad_input.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.errors import CallOrderError, PeerLost, ProtocolViolation, TransportTimeout
from deltasync.sync.protocol import sender_session
from deltasync.sync.protocol.links import ReceiverLinks
from deltasync.sync.protocol.sender_session import Engine, SenderSession
from deltasync.testing.links import send_copy
from deltasync.transports import inprocess
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import (
    Abort,
    Attempt,
    Begin,
    Bucket,
    Commit,
    Hello,
    Lane,
    Message,
    Shares,
)
from tests.golden.make_tables import DOCUMENT, page_with
from tests.worlds import peers

HELLO = peers.hello(parameters=())
PREPARE = peers.prepare(version=2)
ABORT = Abort(version=2, reason="")


def begin(attempt: int) -> Begin:
    return peers.begin(version=2, timeout_s=1.0, attempt=attempt)


def bucket(sequence: int) -> Message:
    return decode(peers.bucket(peers.SPARSE, version=2, sequence=sequence).header)[0]


SHARES = Shares(version=2, num_shares=0)


class Rank:
    """One rank of a trainer, with one receiver."""

    def __init__(self) -> None:
        self.link = inprocess.Sender()

    def greeted(self) -> Message:
        [(peer, greeting)] = self.link.poll(timeout_s=60)
        assert not self.link.open_epoch([peer], timeout_s=60)
        return decode(greeting)[0]

    def send(self, *said: Message) -> None:
        for message in said:
            payload = torch.zeros(64, dtype=torch.uint8) if isinstance(message, Bucket) else None
            header = encode(message, payload_bytes=0 if payload is None else 64)
            send_copy(self.link, Frame(header, payload))


@contextmanager
def connected(world: int) -> Iterator[tuple[list[Rank], ReceiverLinks]]:
    ranks = [Rank() for _ in range(world)]
    lanes = ReceiverLinks([rank.link.receiver() for rank in ranks])
    lanes.connect(HELLO, timeout_s=60)
    greetings = [rank.greeted() for rank in ranks]
    hello = greetings[0]
    assert isinstance(hello, Hello)
    assert hello.lanes == world - 1
    assert hello.connection is not None
    assert set(greetings[1:]) == {Lane(connection=hello.connection)}
    yield ranks, lanes
    lanes.close()


def taken(lanes: ReceiverLinks) -> list[tuple[int, Message]]:
    found: list[tuple[int, Message]] = []
    while True:
        try:
            lane, message, _ = lanes.receive(timeout_s=0)
        except TransportTimeout:
            return found
        found.append((lane, message))


def test_w20_a_lane_is_heard_from_the_attempt_on_until_it_has_prepared() -> None:
    with connected(3) as (ranks, lanes):
        ranks[1].send(Attempt(number=1), bucket(0), PREPARE, Attempt(number=2), bucket(0))
        ranks[2].send(Attempt(number=1), SHARES, PREPARE)
        assert taken(lanes) == []  # it may be aborted before it begins
        ranks[0].send(begin(1), bucket(0), PREPARE)
        found = taken(lanes)
        assert found[0] == (0, begin(1))
        assert [m for lane, m in found if lane == 1] == [bucket(0), PREPARE]
        assert [m for lane, m in found if lane == 2] == [SHARES, PREPARE]
        ranks[0].send(begin(2))
        assert taken(lanes) == [(0, begin(2)), (1, bucket(0))]
        ranks[0].send(begin(2))
        with pytest.raises(ProtocolViolation):
            taken(lanes)


# What rank 1 has sent of an attempt when the whole is aborted: all of it, or as far as it came.
LEFT: list[list[Message]] = [
    [],
    [bucket(0)],
    [bucket(0), ABORT],
    [bucket(0), bucket(1), PREPARE],
]


@given(
    before=st.lists(st.sampled_from(LEFT), max_size=3),
    told=st.lists(st.booleans(), min_size=3, max_size=3),
    is_late=st.booleans(),
    begins=st.booleans(),
)
def test_w20_what_is_left_of_an_attempt_is_passed_over(
    before: list[list[Message]], told: list[bool], is_late: bool, begins: bool
) -> None:
    with connected(2) as (ranks, lanes):
        for number, (left, is_told) in enumerate(zip(before, told, strict=False), start=1):
            if is_late:  # the lane tells of it after it was aborted
                ranks[0].send(begin(number), ABORT)
                assert taken(lanes) == [(0, begin(number)), (0, ABORT)]
            if is_told or left:
                ranks[1].send(Attempt(number=number), *left)
            if not is_late:
                ranks[0].send(*([begin(number)] if begins else []), ABORT)
                found = [message for lane, message in taken(lanes) if lane == 0]
                assert found[-1] == ABORT
        assert taken(lanes) == []
        ranks[0].send(begin(9), PREPARE)
        ranks[1].send(Attempt(number=9), bucket(0), PREPARE)
        assert sorted(taken(lanes), key=lambda pair: pair[0]) == [
            (0, begin(9)),
            (0, PREPARE),
            (1, bucket(0)),
            (1, PREPARE),
        ]


@pytest.mark.parametrize("said", [Commit(version=2), Attempt(number=1), HELLO, None])
def test_w19_w20_a_lane_carries_nothing_else_and_losing_it_is_losing_the_trainer(
    said: Message | None,
) -> None:
    with connected(2) as (ranks, lanes):
        ranks[1].send(Attempt(number=1))
        ranks[0].send(begin(1))
        if said is None:
            ranks[1].link.close()
        else:
            ranks[1].send(said)
        with pytest.raises(PeerLost if said is None else ProtocolViolation):
            taken(lanes)


def test_w26_what_a_sender_checks_before_it_goes_on() -> None:
    engine = Engine("a", {0: sender_session.Rank(0), 1: sender_session.Rank(1)})
    session = SenderSession(version=3, members={"a": engine})
    with pytest.raises(CallOrderError, match="members would miss"):
        session.captured(4)
    with pytest.raises(CallOrderError, match="v2 after v3"):
        session.begin([engine], version=2)
    session.begin([engine], version=4)
    for peer in (0, 1):
        with pytest.raises(CallOrderError, match="not every participant"):
            session.decide()
        session.prepared(peer, 0)
    session.decide()
    assert session.version == 4


def test_the_page_shows_the_tables() -> None:
    page = DOCUMENT.read_text()
    assert page == page_with(page), "python -m tests.golden.make_tables"
