"""Rule W26 of docs/wire-format.md: the page, and what a sender refuses to do.

What a receiver refuses is in tests/sync/test_bad_input.py.
"""

from __future__ import annotations

import pytest

from deltasync.errors import CallOrderError
from deltasync.sync.protocol.sender_session import Member, SenderSession
from tests.golden.make_tables import DOCUMENT, page_with


def member(peer: int) -> Member:
    return Member(peer, "a")


def test_w26_what_a_sender_checks_before_it_goes_on() -> None:
    session = SenderSession(version=3, members={0: member(0)})
    with pytest.raises(CallOrderError, match="members would miss"):
        session.captured(4)
    with pytest.raises(CallOrderError, match="v2 after v3"):
        session.begin([member(0), member(1)], version=2)
    session.begin([member(0), member(1)], version=4)
    for peer in (0, 1):
        with pytest.raises(CallOrderError, match="not every participant"):
            session.decide()
        session.prepared(peer)
    session.decide()
    assert session.version == 4


def test_the_page_shows_the_tables() -> None:
    page = DOCUMENT.read_text()
    assert page == page_with(page), "python -m tests.golden.make_tables"
