"""The state machines, driven by arbitrary messages."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deltasync.errors import (
    CallOrderError,
    DeltaSyncError,
    ProtocolViolation,
    VersionGap,
    WrongStream,
)
from deltasync.sync.protocol.receiver_session import RECEIVER, Event, ReceiverSession, ReceiverState
from deltasync.sync.protocol.sender_session import Member, SenderPhase, SenderSession
from deltasync.wire import messages
from deltasync.wire.messages import Abort, Begin, Bucket, Commit, Finish, Layout, Prepare, Welcome

HASH = messages.layout_hash(())
ENGINES = ("a", "b")


def layout(version: int = 1, stream: str = "run") -> Layout:
    return Layout(stream_id=stream, version=version, parameters=(), digest="0" * 16)


def begin(version: int, base: int | None, stream: str = "run", layout_hash: str = HASH) -> Begin:
    return Begin(
        stream_id=stream,
        version=version,
        base_version=base,
        layout_hash=layout_hash,
        sparse_bytes=0,
        dense_bytes=0,
        timeout_s=60.0,
    )


def bucket(version: int, sequence: int) -> Bucket:
    return Bucket(version=version, sequence=sequence, num_rows=1, raw_bytes=48, compression="none")


def ready(version: int = 1, world: int = 1) -> ReceiverSession:
    session = ReceiverSession("a", world)
    session.on("greeted")
    session.on(layout(version))
    session.on(Welcome(full_sync=()))
    return session


@pytest.mark.promise(
    "All or nothing",
    "A version becomes final only when every receiver that takes it has staged it and "
    "predicts the trainer's digest.",
)
def test_a_whole_delta_sync() -> None:
    session = ready(4)
    for message in (begin(5, 4), bucket(5, 0), bucket(5, 1), Prepare(version=5, num_buckets=2)):
        session.on(message)
        assert session.version == 4
    assert session.state is ReceiverState.PREPARED
    session.on(Commit(version=5))
    assert session.version == 4
    session.on("committed")
    assert session.version == 5
    session.on(Finish(version=5, undo=()))
    assert (session.state, session.version, session.dirty) == (ReceiverState.READY, 5, False)


def test_a_full_sync_is_only_for_those_that_wait_for_one() -> None:
    session = ready(4)
    with pytest.raises(ProtocolViolation):
        session.on(begin(5, None))
    session = ReceiverSession("a")
    session.on("greeted")
    session.on(layout(7))
    session.on(Welcome(full_sync=("a",)))
    with pytest.raises(VersionGap):
        session.on(begin(8, 7))
    session.on(begin(7, None))
    assert session.state is ReceiverState.STAGING


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (begin(5, 3), VersionGap),
        (begin(6, 5), VersionGap),
        (begin(4, 4), ProtocolViolation),
        (begin(5, 4, stream="another"), WrongStream),
        (begin(5, 4, layout_hash="1" * 64), ProtocolViolation),
        (bucket(5, 0), ProtocolViolation),
        (Prepare(version=5, num_buckets=0), ProtocolViolation),
        (Commit(version=5), ProtocolViolation),
        (Finish(version=5, undo=()), ProtocolViolation),
        (layout(5), ProtocolViolation),
        (Welcome(full_sync=()), ProtocolViolation),
    ],
)
def test_what_a_ready_receiver_refuses(
    message: messages.Message, error: type[DeltaSyncError]
) -> None:
    session = ready(4)
    before = dataclasses.replace(session)
    with pytest.raises(error):
        session.on(message)
    assert session == before


def test_buckets_come_once_and_in_order() -> None:
    session = ready(1)
    session.on(begin(2, 1))
    for wrong in (bucket(2, 1), bucket(3, 0)):
        with pytest.raises(ProtocolViolation):
            session.on(wrong)
    session.on(bucket(2, 0))
    with pytest.raises(ProtocolViolation):
        session.on(bucket(2, 0))
    with pytest.raises(ProtocolViolation):
        session.on(Prepare(version=2, num_buckets=2))


def test_all_is_there_when_each_connection_has_said_so() -> None:
    session = ready(1)
    session.lanes = 3
    session.on(begin(2, 1))
    for lane in (0, 2, 1):
        assert session.state is ReceiverState.STAGING
        session.on(Prepare(version=2, num_buckets=0), lane=lane)
    assert session.state is ReceiverState.PREPARED


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_lost_payload_leaves_only_an_abort(lanes: int) -> None:
    session = ready(1)
    session.lanes = lanes
    with pytest.raises(CallOrderError):
        session.on("cut off")
    session.on(begin(2, 1))
    session.on("cut off")
    session.on(Prepare(version=2, num_buckets=1))
    assert session.awaits_abort == (lanes == 1)
    if lanes == 2:
        session.on(Prepare(version=2, num_buckets=0), lane=1)
    assert session.awaits_abort
    assert not session.is_unchanged
    for refused in (Prepare(version=2, num_buckets=1), bucket(2, 0), Commit(version=2)):
        with pytest.raises(ProtocolViolation):
            session.on(refused)
    session.on(Abort(version=2, reason=""))
    assert (session.state, session.version, session.dirty) == (ReceiverState.READY, 1, False)
    session.on(begin(2, 1))
    with pytest.raises(ProtocolViolation):
        session.on(Prepare(version=2, num_buckets=1))


def test_an_abort_leads_back_to_the_old_version() -> None:
    session = ready(1)
    session.on(begin(2, 1))
    session.on(Abort(version=2, reason=""))
    assert (session.state, session.version) == (ReceiverState.READY, 1)
    session.on(begin(2, 1))


@pytest.mark.promise("Errors", "`DirtyReceiver`: refuses to serve until a full sync.")
def test_breaking_off_in_place_is_dirty_until_a_version_is_kept() -> None:
    session = ready(1)
    session.on(begin(2, 1))
    session.on("writing")
    session.on(Abort(version=2, reason=""))
    assert session.dirty
    assert session.state is ReceiverState.OUTSIDE
    session.on("greeted")
    assert session.dirty
    session.on(layout(2))
    session.on(Welcome(full_sync=("a",)))
    assert session.dirty
    for message in (begin(2, None), Prepare(version=2, num_buckets=0), Commit(version=2)):
        session.on(message)
    session.on("committed")
    session.on(Finish(version=2, undo=()))
    assert not session.dirty


def test_an_undo_leaves_what_was_dirty_before_dirty() -> None:
    session = ReceiverSession("a", dirty=True, half_written=True)
    session.on("greeted")
    session.on(layout(2))
    session.on(Welcome(full_sync=("a",)))
    for message in (begin(2, None), Prepare(version=2, num_buckets=0), Commit(version=2)):
        session.on(message)
    session.on("writing")
    session.on("restored")
    assert session.dirty
    assert session.half_written


def test_the_ranks_of_an_engine_wait_for_each_other() -> None:
    for undo, version in [((), 2), (("a",), 1)]:
        session = ready(1, world=2)
        for message in (begin(2, 1), Prepare(version=2, num_buckets=0), Commit(version=2)):
            session.on(message)
        session.on("writing")
        session.on("committed")
        assert (session.state, session.version) == (ReceiverState.COMMITTED, 1)
        session.on(Finish(version=2, undo=undo))
        assert session.version == version
        assert session.dirty == session.undone == bool(undo)
        if undo:
            session.on("restored")
            assert not session.dirty


@pytest.mark.parametrize(("world", "version", "dirty"), [(1, 2, False), (2, 1, True)])
def test_losing_the_sender_between_commit_and_finish(world: int, version: int, dirty: bool) -> None:
    session = ready(1, world)
    for message in (begin(2, 1), Prepare(version=2, num_buckets=0), Commit(version=2)):
        session.on(message)
    session.on("committed")
    session.on("lost")
    assert (session.version, session.dirty) == (version, dirty)
    assert session.state is ReceiverState.OUTSIDE


def test_invalidate_forgets_the_version() -> None:
    session = ready(3)
    session.on("invalidated")
    assert (session.state, session.version) == (ReceiverState.OUTSIDE, None)
    with pytest.raises(ProtocolViolation):
        session.on(begin(4, 3))


@pytest.mark.parametrize("leave", ["lost", "invalidated", "detached"])
@pytest.mark.parametrize(("world", "dirty"), [(1, False), (2, True)])
def test_leaving_between_commit_and_finish_is_dirty_where_other_ranks_may_differ(
    world: int, dirty: bool, leave: Event
) -> None:
    session = ready(1, world)
    for message in (begin(2, 1), Prepare(version=2, num_buckets=0), Commit(version=2)):
        session.on(message)
    session.on("committed")
    session.on(leave)
    assert session.dirty == dirty


@pytest.mark.parametrize("attached_after", range(5))
def test_a_detached_receiver_stays_a_member_and_takes_no_sync(attached_after: int) -> None:
    session = ready(1)
    session.on("detached")
    sat_out: list[messages.Message] = [messages.Upcoming(version=2), begin(2, 1), bucket(2, 0)]
    for number, message in enumerate([*sat_out, Prepare(version=2, num_buckets=1)]):
        session.on(message)
        assert (session.state, session.version) == (ReceiverState.READY, 1)
        assert session.declined == (2 if number else None)
        if number and number == attached_after:
            session.on("attached")
    with pytest.raises(ProtocolViolation):
        session.on(Commit(version=2))
    session.on(Abort(version=2, reason=""))
    session.on("attached")
    assert session.declined is None
    session.on(begin(2, 1))
    assert session.state is ReceiverState.STAGING
    session.on("detached")
    assert (session.state, session.version) == (ReceiverState.OUTSIDE, 1)


any_version = st.integers(0, 4)
any_message = st.one_of(
    st.builds(layout, any_version, st.sampled_from(["run", "other"])),
    st.builds(Welcome, full_sync=st.sampled_from([(), ("a",), ("b",)])),
    st.builds(begin, any_version, st.none() | any_version, st.sampled_from(["run", "other"])),
    st.builds(bucket, any_version, st.integers(0, 2)),
    st.builds(Prepare, version=any_version, num_buckets=st.integers(0, 2)),
    st.builds(Commit, version=any_version),
    st.builds(Finish, version=any_version, undo=st.sampled_from([(), ("a",), ("b",)])),
    st.builds(Abort, version=any_version, reason=st.just("")),
    st.just(messages.Held(digest="0" * 16, parts=(), half_written=False, max_staged_bytes=0)),
)
local_event = st.sampled_from(get_args(Event))


@given(st.lists(any_message | local_event, max_size=40), st.integers(1, 2))
def test_arbitrary_messages_never_break_a_receiver(
    events: list[messages.Message | Event], world: int
) -> None:
    session = ReceiverSession("a", world)
    for event in events:
        before = dataclasses.replace(session)
        try:
            session.on(event)
        except DeltaSyncError:
            assert session == before, "an illegal message changed something"
            continue
        kind = event if isinstance(event, str) else type(event)
        assert session.state in [rule.then for rule in RECEIVER[before.state][kind]]
        check_receiver_step(before, session, event)


def check_receiver_step(before: ReceiverSession, after: ReceiverSession, event: object) -> None:
    if after.version != before.version and after.version is not None:
        was_committed = before.state is ReceiverState.COMMITTED or event == "committed"
        assert was_committed or isinstance(event, Welcome), "a version without a commit"
    if before.dirty and not after.dirty:
        assert isinstance(event, Finish | Welcome) or event in ("committed", "restored")
    if after.state is ReceiverState.COMMITTING:
        assert before.state is ReceiverState.PREPARED
    if before.detached and not isinstance(event, str):
        assert after.state is before.state
    if isinstance(event, Abort):  # only who has written in place since `begin` leaves
        assert after.dirty == before.dirty
        assert (after.state is ReceiverState.OUTSIDE) == before._has_written or after == before


class SenderMachine(RuleBasedStateMachine):
    """Every way through a sender's sync, checked against what receivers can have."""

    def __init__(self) -> None:
        super().__init__()
        self.session = SenderSession()
        self.next_peer = 0
        self.decided_with: set[int] = set()

    @rule(world=st.integers(1, 3), engine=st.sampled_from(ENGINES))
    @precondition(lambda self: self.session.phase is SenderPhase.IDLE)
    def admit(self, world: int, engine: str) -> None:
        if any(m.engine == engine for m in self.session.members.values()):
            return
        made = [Member(self.next_peer + r, engine, r, world) for r in range(world)]
        self.next_peer += world
        self.session.admit(made)

    @rule()
    @precondition(lambda self: self.session.phase is SenderPhase.IDLE and self.session.members)
    def begin(self) -> None:
        self.session.begin(list(self.session.members.values()), version=self.session.version + 1)

    @rule(data=st.data())
    @precondition(lambda self: self.session.participants and self.session.phase != SenderPhase.IDLE)
    def answer(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.session.participants)))
        if self.session.phase is SenderPhase.STAGING and peer not in self.session.failures:
            self.session.prepared(peer)
        elif self.session.phase is SenderPhase.DECIDED and peer not in self.session.failures:
            self.session.committed(peer)

    @rule(data=st.data())
    @precondition(lambda self: self.session.participants and self.session.phase != SenderPhase.IDLE)
    def fail(self, data: st.DataObject) -> None:
        self.session.failed(data.draw(st.sampled_from(sorted(self.session.participants))), "why")

    @rule()
    @precondition(lambda self: self.session.phase is SenderPhase.STAGING)
    def decide(self) -> None:
        version = self.session.version
        here = set(self.session.participants)
        prepared = here and here == self.session._done
        if prepared:
            self.session.decide()
            assert self.session.version == version + 1
        else:
            with pytest.raises(CallOrderError):
                self.session.decide()
            assert self.session.version == version

    @rule(engines=st.sets(st.sampled_from(ENGINES)))
    @precondition(lambda self: self.session.phase is SenderPhase.STAGING)
    def narrow(self, engines: set[str]) -> None:
        before = dict(self.session.participants)
        leaving = {m.peer for m in self.session.narrow(engines)}
        assert leaving == {peer for peer, m in before.items() if m.engine not in engines}
        assert self.session.participants.keys() == before.keys() - leaving
        assert not leaving & self.session.members.keys()
        assert {before[peer].engine for peer in leaving} <= {
            before[peer].engine for peer in self.session.failures if peer in before
        }

    @rule()
    @precondition(lambda self: self.session.phase is SenderPhase.STAGING)
    def abort(self) -> None:
        version = self.session.version
        leaving = {m.peer for m in self.session.abort()}
        assert self.session.version == version
        assert self.session.failures.keys() & self.session.participants.keys() <= leaving

    @rule()
    @precondition(lambda self: self.session.phase is SenderPhase.DECIDED)
    def finish(self) -> None:
        undone = self.session.undone(ENGINES)
        done = set(self.session._done)
        leaving = self.session.finish()
        assert {m.engine for m in leaving} == set(undone)
        for peer, member in self.session.members.items():
            assert peer in done, "a member that has not committed"
            assert member.engine not in undone

    @invariant()
    def engines_are_whole(self) -> None:
        """An engine is a member with all its ranks or not at all."""
        by_engine: dict[str, set[int]] = {}
        worlds: dict[str, int] = {}
        for member in self.session.members.values():
            by_engine.setdefault(member.engine, set()).add(member.rank)
            worlds[member.engine] = member.world
        if self.session.phase is SenderPhase.IDLE:
            for engine, ranks in by_engine.items():
                assert ranks == set(range(worlds[engine]))


TestSenderMachine = SenderMachine.TestCase
