"""Rule W26 of docs/wire-format.md: messages and events that the tables do not have are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import deltasync
from deltasync.errors import CallOrderError, DeltaSyncError, ProtocolViolation
from deltasync.sync.protocol.receiver_session import (
    RECEIVER,
    Event,
    ReceiverSession,
    ReceiverState,
)
from deltasync.sync.protocol.sender_session import SENDER, Member, SenderSession
from deltasync.sync.protocol.table import Rule
from deltasync.wire import messages as m
from deltasync.wire.frame import decode
from tests.golden.make_golden import FOLDER, MESSAGES
from tests.golden.make_tables import DOCUMENT, page_with

PACKAGE = Path(deltasync.__file__).parent
EVENTS: tuple[Event, ...] = get_args(Event)
LAYOUT = m.Layout(stream_id="run", version=1, parameters=(), digest="0" * 16)


def begin(base: int | None) -> m.Begin:
    return m.Begin(
        stream_id="run",
        version=2,
        base_version=base,
        layout_hash=LAYOUT.hash,
        sparse_bytes=0,
        dense_bytes=0,
        timeout_s=60.0,
    )


def bucket(version: int, sequence: int) -> m.Bucket:
    return m.Bucket(version=version, sequence=sequence, num_rows=1, raw_bytes=1, compression="none")


# Of each message what fits at some moment, and what fits at none: of a version that never comes.
SAID: list[m.Message] = [
    LAYOUT,
    m.Welcome(full_sync=()),
    m.Welcome(full_sync=("a",)),
    m.Upcoming(version=2),
    *(begin(base) for base in (None, 1)),
    *(bucket(version, 0) for version in (2, 9)),
    *(m.Prepare(version=version, num_buckets=1) for version in (2, 9)),
    *(m.Commit(version=version) for version in (2, 9)),
    *(m.Finish(version=version, undo=undo) for version in (2, 9) for undo in ((), ("a",))),
    *(m.Abort(version=version, reason="") for version in (2, 9)),
]
ALL_KINDS = [decode((FOLDER / f"{name}.bin").read_bytes())[0] for name in MESSAGES]


def seen(session: ReceiverSession | SenderSession) -> tuple[object, ...]:
    """All of a session, to be compared; messages by identity."""
    values = vars(session).values()
    return tuple(id(value) if isinstance(value, BaseModel) else str(value) for value in values)


def copied(session: ReceiverSession) -> ReceiverSession:
    return replace(session, _next_bucket=[*session._next_bucket])


def rule_for(session: ReceiverSession, what: m.Message | Event, lane: int) -> Rule[Any] | None:
    """What the table says."""
    is_local, begun = isinstance(what, str), session.begun
    if not (is_local or begun is None or getattr(what, "version", None) == begun.version):
        return None
    kind = what if is_local else type(what)
    for rule in RECEIVER[session.state].get(kind, ()):
        if rule.when is None or rule.when(session, what, lane):
            return rule
    return None


def may_raise(rule: Rule[Any] | None) -> bool:
    return rule is not None and rule.do is not None


def follow(session: ReceiverSession, what: m.Message | Event, lane: int) -> Rule[Any] | None:
    """The rule that was followed; checks that it leads where it says, or that nothing changed."""
    before, state = seen(session), session.state
    rule = rule_for(session, what, lane)
    try:
        session.on(what, lane=lane)
    except DeltaSyncError as error:
        assert seen(session) == before, "what was refused has changed something"
        expected = CallOrderError if isinstance(what, str) else ProtocolViolation
        return None if type(error) is expected or may_raise(rule) else pytest.fail(str(error))
    assert rule is not None, f"{what} while {state}"
    assert session.state is (rule.then or state)
    assert {name: getattr(session, name) for name in rule.sets} == rule.sets
    return rule


def walk(
    world: int, lanes: int, events: Sequence[Event]
) -> tuple[list[Rule[Any]], list[ReceiverSession]]:
    """The rules followed on all ways from the beginning, and a session of each kind met."""
    first = ReceiverSession("a", world, lanes)
    met, to_do = {seen(first): first}, [first]
    followed: dict[int, Rule[Any]] = {}
    while to_do:
        session = to_do.pop()
        for what in (*SAID, *events):
            for lane in range(lanes):
                after = copied(session)
                rule = follow(after, what, lane)
                if rule is None:
                    continue
                followed[id(rule)] = rule
                if (now := seen(after)) not in met:
                    met[now] = after
                    to_do.append(after)
    return list(followed.values()), list(met.values())


Walked = list[tuple[list[Rule[Any]], list[ReceiverSession]]]


@pytest.fixture(scope="module")
def walked() -> Walked:
    few: tuple[Event, ...] = ("greeted", "committed", "lost")
    return [walk(2, 1, EVENTS), walk(1, 1, (*few, "writing")), walk(1, 2, few)]


def test_w26_every_line_is_followed_and_leads_where_it_says(walked: Walked) -> None:
    followed = {id(rule) for rules, _ in walked for rule in rules}
    lines = [rule for table in RECEIVER.values() for rules in table.values() for rule in rules]
    assert [rule for rule in lines if id(rule) not in followed] == []


def test_w26_every_message_that_a_state_has_no_line_for_is_refused(walked: Walked) -> None:
    for state in ReceiverState:
        session = next(s for _, met in walked for s in met if s.state is state and not s.detached)
        for what in ALL_KINDS:
            if type(what) not in RECEIVER.get(state, {}):
                before = seen(session)
                with pytest.raises(ProtocolViolation):
                    session.on(what)
                assert seen(session) == before


def member(peer: int) -> Member:
    return Member(peer, "a")


def staging() -> SenderSession:
    session = SenderSession()
    session.admit([member(0)])
    session.begin([member(0)], version=1)
    return session


def ready_to_decide() -> SenderSession:
    session = staging()
    session.prepared(0)
    return session


def decided() -> SenderSession:
    session = ready_to_decide()
    session.decide()
    return session


SENDERS: list[Callable[[], SenderSession]] = [SenderSession, staging, ready_to_decide, decided]
CALLS: dict[str, Callable[[SenderSession], object]] = {
    "captured": lambda sender: sender.captured(sender.version + 1),
    "admit": lambda session: session.admit([member(0)]),
    "left": lambda session: session.left(next(iter(session.members), 0)),
    "begin": lambda session: session.begin([member(0)], version=session.version),
    "prepared": lambda session: session.prepared(0),
    "failed": lambda session: session.failed(0, "why"),
    "spare": lambda session: session.spare({0: "why"}, (), may_repeat=True),
    "narrow": lambda session: session.narrow(["a"]),
    "decide": SenderSession.decide,
    "abort": SenderSession.abort,
    "committed": lambda session: session.committed(0),
    "undone": lambda session: session.undone(["a"]),
    "finish": SenderSession.finish,
    "reset": SenderSession.reset,
}


@pytest.mark.parametrize("make", SENDERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("event", CALLS)
def test_w26_a_sender_goes_where_its_table_says(
    make: Callable[[], SenderSession], event: str
) -> None:
    session = make()
    if event == "left" and not session.members:
        session.admit([member(0)])
    before, rules = seen(session), SENDER[session.phase].get(event, ())
    try:
        CALLS[event](session)
    except CallOrderError:
        assert seen(session) == before
        assert not rules or rules[0].do is not None
    else:
        assert [rule.then for rule in rules] == [session.phase]


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
