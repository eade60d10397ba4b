"""Senders that say what does not belong there: typed errors, and not one bit changed.

What is wrong in itself, whenever it is said, is in `worlds.lies`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltasync import DeltaSyncError
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    DirtyReceiver,
    LayoutMismatch,
    LimitExceeded,
    MalformedMessage,
    ProtocolViolation,
    Refused,
    SyncAborted,
    TransportTimeout,
    TruncatedFrame,
    UnknownDtype,
    VersionGap,
    WrongStream,
)
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.testing.links import PROMPT_S, within
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire import messages
from deltasync.wire.compression import compress
from deltasync.wire.frame import encode
from deltasync.wire.messages import (
    Abort,
    Failed,
    Finish,
    Message,
    Shares,
    Upcoming,
    entries,
)
from tests.golden.make_golden import MESSAGES
from tests.wire import reference
from tests.worlds.lies import header_of
from tests.worlds.links import ThroughReceiver
from tests.worlds.peers import (
    BASE,
    DENSE,
    HASH,
    JOINED,
    NEXT,
    OPTIONS,
    SPARSE,
    SPECS,
    STAGED,
    STREAM,
    Hand,
    Said,
    begin,
    bucket,
    commit,
    frame,
    layout,
    prepare,
    said,
    tensor,
    welcome,
    zipped,
)

SHARES = frame(Shares(version=NEXT, num_shares=1), reference.SHARE.pack(0, 0, 0, 1, 40, 40))
IN_PLACE = OPTIONS.model_copy(update={"max_staged_bytes": 0})
CASES: dict[str, tuple[list[Said], type[DeltaSyncError]]] = {
    "payload that was not declared": (
        [*JOINED, Frame(encode(begin()), tensor(b"12345678"))],
        TruncatedFrame,
    ),
    "payload over the limit": ([*JOINED, begin(), bucket(data=bytes(4097))], LimitExceeded),
    "inflates over the limit": (
        [*JOINED, begin(), zipped(compress(bytes(8256)), whole=4096)],
        LimitExceeded,
    ),
    # Joining.
    "unknown dtype": ([said(layout(), parameters=[[["a"], [8, 5], 99]])], UnknownDtype),
    "layout names a name twice": (
        [said(layout(), parameters=[[["a"], [8, 5], 1], [["a"], [8, 5], 1]])],
        MalformedMessage,
    ),
    "layout of another model": (
        [layout(parameters=entries((replace(SPECS[0], names=("d",)), *SPECS[1:])))],
        LayoutMismatch,
    ),
    "layout of a gigantic shape": (
        [layout(parameters=entries((replace(SPECS[0], shape=(1 << 61,)), *SPECS[1:])))],
        LayoutMismatch,
    ),
    "layout of a gigantic parameter that is not held": (
        [layout(parameters=entries((*SPECS, replace(SPECS[0], names=("d",), shape=(1 << 37,)))))],
        LayoutMismatch,
    ),
    "layout of another dtype": (
        [layout(parameters=entries((replace(SPECS[0], dtype=SPECS[1].dtype), *SPECS[1:])))],
        LayoutMismatch,
    ),
    "layout without a parameter": ([layout(parameters=entries(SPECS[:1]))], LayoutMismatch),
    # Order and versions.
    "another stream": ([*JOINED, begin(stream_id="other")], WrongStream),
    "another layout": ([*JOINED, begin(layout_hash="f" * 64)], ProtocolViolation),
    "older base": ([*JOINED, begin(base_version=BASE - 1)], VersionGap),
    "skipped version": ([*JOINED, begin(base_version=NEXT, version=NEXT + 1)], VersionGap),
    "version that does not rise": ([*JOINED, begin(version=BASE)], ProtocolViolation),
    "full sync unasked": ([*JOINED, begin(base_version=None)], ProtocolViolation),
    "delta instead of a full sync": ([layout(), welcome(full=True), begin()], VersionGap),
    "bucket without a begin": ([*JOINED, bucket(SPARSE)], ProtocolViolation),
    "bucket of another version": (
        [*JOINED, begin(), bucket(SPARSE, version=NEXT + 1)],
        ProtocolViolation,
    ),
    "shares twice": ([*JOINED, begin(), SHARES, SHARES], ProtocolViolation),
    "shares after a bucket": ([*STAGED, SHARES], ProtocolViolation),
    "bucket repeated": ([*STAGED, bucket(SPARSE, DENSE)], ProtocolViolation),
    "bucket skipped": ([*JOINED, begin(), bucket(SPARSE, sequence=1)], ProtocolViolation),
    "buckets reordered": (
        [*JOINED, begin(), bucket(DENSE, sequence=1), bucket(SPARSE, sequence=0)],
        ProtocolViolation,
    ),
    "prepare of more buckets": ([*STAGED, prepare(2)], ProtocolViolation),
    "prepare of fewer buckets": ([*STAGED, prepare(0)], ProtocolViolation),
    "prepare of another version": ([*STAGED, prepare(version=7)], ProtocolViolation),
    "bucket after prepare": (
        [*JOINED, begin(), bucket(SPARSE), prepare(), bucket(DENSE, sequence=1)],
        ProtocolViolation,
    ),
    "commit of another version": ([*STAGED, prepare(), commit(NEXT + 1)], ProtocolViolation),
    "finish, to an engine of one rank": (
        [*JOINED, Finish(version=BASE, undo=())],
        ProtocolViolation,
    ),
    "finish that undoes": ([*JOINED, Finish(version=BASE, undo=("engine",))], ProtocolViolation),
    "abort of another version": ([*STAGED, Abort(version=99, reason="")], ProtocolViolation),
    "commit after abort": (
        [*STAGED, prepare(), Abort(version=NEXT, reason=""), commit()],
        ProtocolViolation,
    ),
    "a sync that stops": ([*STAGED], TransportTimeout),
    "a sync that stops before the decision": ([*STAGED, prepare()], TransportTimeout),
    # Memory.
    "begin of less than its buckets": (
        [*JOINED, begin(payload_bytes=127), bucket(SPARSE, DENSE)],
        LimitExceeded,
    ),
    "begin of fewer places than its buckets": (
        [*JOINED, begin(places=2), bucket(SPARSE, DENSE)],
        LimitExceeded,
    ),
    "begin of more places than elements": ([*JOINED, begin(places=74)], LimitExceeded),
    "begin of 2^62 bytes": ([*JOINED, begin(payload_bytes=1 << 62)], LimitExceeded),
    "full sync of 2^62 bytes": (
        [layout(), welcome(full=True), begin(base_version=None, payload_bytes=1 << 62)],
        LimitExceeded,
    ),
}


@pytest.mark.promise(
    "Errors",
    "`VersionGap`, `WrongStream`, every `WireError`: nothing is written, and the receiver rejoins.",
)
@pytest.mark.parametrize("name", CASES)
def test_w16_w26_a_bad_sender_changes_no_bit_and_the_receiver_rejoins(name: str) -> None:
    talk, expected = CASES[name]
    hand = Hand()
    error = hand.say(talk)
    assert type(error) is expected, repr(error)
    assert hand.is_untouched()
    assert not hand.receiver.is_dirty
    hand.receiver.check_serving()
    *_, last = hand.replies()
    assert isinstance(last, Failed)
    assert last.error == type(error).__name__
    assert not hand.transport.is_connected(hand.peer)
    hand.serve_honestly()


TALK: list[Said] = [*STAGED, prepare()]
EXPECTED: list[set[str]] = [
    {"layout"},
    {"welcome"},
    {"upcoming", "begin", "begin-full", "abort"},
    {"prepare", "prepare-patch", "abort"},
    {"abort"},
    {"commit", "abort"},
]
"""The kinds that may come after so many of TALK; these come whenever they want."""
ALWAYS = {"refused"}
FITTING = {"version": NEXT, "base_version": BASE, "stream_id": STREAM, "layout_hash": HASH}


@pytest.mark.parametrize("told", range(len(EXPECTED)))
def test_w26_no_message_comes_out_of_turn(told: int) -> None:
    hand = Hand()
    for name in sorted(MESSAGES.keys() - EXPECTED[told] - ALWAYS):
        fits = {key: FITTING.get(key, value) for key, value in MESSAGES[name].items()}
        error = hand.say([*TALK[:told], Frame(header_of(fits))])
        assert isinstance(error, ProtocolViolation), (name, error)
        assert hand.is_untouched(), name
    hand.serve_honestly()


@pytest.mark.promise("Errors", "In place, every mixture of versions is detected.")
@pytest.mark.parametrize("name", CASES)
def test_a_bad_sender_leaves_no_mixture_unnoticed_where_syncs_are_written_in_place(
    name: str,
) -> None:
    talk, expected = CASES[name]
    hand = Hand(IN_PLACE)
    error = hand.say(talk)
    assert isinstance(
        error, DeltaSyncError if expected is LimitExceeded else expected | SyncAborted
    )
    assert hand.is_untouched() or hand.receiver.is_dirty
    hand.serve_honestly()


@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
def test_in_place_an_earlier_bucket_is_written_and_the_receiver_refuses_to_serve() -> None:
    hand = Hand(IN_PLACE)
    small = begin(payload_bytes=64)  # the first bucket is all that it declares
    error = hand.say([*JOINED, small, bucket(SPARSE), bucket(DENSE, sequence=1)])
    assert type(error) is LimitExceeded
    now = [as_bits(parameter.data) for parameter in hand.module.parameters()]
    expected = [bits.clone() for bits in hand.before]
    expected[0].view(-1)[list(SPARSE.places or ())] = 0x4141
    assert all(torch.equal(a, b) for a, b in zip(expected, now, strict=True))
    with pytest.raises(DirtyReceiver):
        hand.receiver.check_serving()
    hand.serve_honestly()


class Repacked(ThroughReceiver):
    """Of a sender that gives the receiver up, and packs where the payload is that it looks at."""

    def receive(self, *, timeout_s: float) -> Frame:
        self.frame = super().receive(timeout_s=timeout_s)
        return self.frame

    def progress(self) -> None:
        if self.frame.payload is not None:
            self.frame.payload.fill_(0x7F)


def test_a_payload_that_changes_while_it_is_looked_at_is_not_written_elsewhere() -> None:
    hand = Hand(IN_PLACE, wrap=Repacked)
    hand.say([*JOINED, begin(), bucket(SPARSE)])
    now = [as_bits(parameter.data) for parameter in hand.module.parameters()]
    expected = [bits.clone() for bits in hand.before]
    expected[0].view(-1)[list(SPARSE.places or ())] = 0x7F7F
    assert all(torch.equal(a, b) for a, b in zip(expected, now, strict=True))


@pytest.mark.promise(
    "All or nothing",
    "If the sender dies between commit and finish, a rank that does not know what the others "
    "hold is dirty.",
)
def test_a_rank_that_never_hears_whether_its_engine_committed_must_not_serve() -> None:
    hand = Hand(world=2)
    error = hand.say([*STAGED, prepare(), commit(), Finish(version=99, undo=())])
    assert type(error) is ProtocolViolation
    with pytest.raises(DirtyReceiver):
        hand.receiver.check_serving()


class Chatty(ThroughReceiver):
    """Of a sender that says the same again and again."""

    says: Message | None = None

    def receive(self, *, timeout_s: float) -> Frame:
        if self.says is None:
            return super().receive(timeout_s=timeout_s)
        return Frame(encode(self.says))


@pytest.mark.parametrize("says", [Upcoming(version=NEXT), Abort(version=NEXT, reason="")])
def test_no_talk_makes_a_wait_for_a_sync_longer(says: Message) -> None:
    links: list[Chatty] = []

    def chatty(link: ReceiveTransport) -> Chatty:
        links.append(Chatty(link))
        return links[-1]

    hand = Hand(wrap=chatty)
    assert type(hand.say(JOINED)) is TransportTimeout
    links[0].says = says
    with within(PROMPT_S), pytest.raises(TransportTimeout):
        hand.receiver.stage(timeout_s=0.1)
    assert hand.receiver.state is ReceiverState.READY


@pytest.mark.promise("Errors", "`Refused` says why.")
def test_a_refusal_is_told_with_its_reason() -> None:
    hand = Hand()
    error = hand.say([messages.Refused(error="ConfigError", reason="no room")])
    assert isinstance(error, Refused)
    assert (error.kind, error.message) == ("ConfigError", "no room")
    hand.serve_honestly()


def test_a_sync_aborted_while_it_is_written_in_place_is_dirty_and_it_rejoins_at_once() -> None:
    hand = Hand(OPTIONS.model_copy(update={"stall_timeout_s": 20.0, "max_staged_bytes": 0}))
    error = hand.say([*STAGED, Abort(version=NEXT, reason="")])
    assert type(error) is SyncAborted
    assert hand.receiver.is_dirty
    hand.serve_honestly()


@pytest.mark.promise("All or nothing", "A receiver that has written nothing is not dirty.")
def test_a_sync_aborted_before_it_is_written_in_place_costs_nothing() -> None:
    hand = Hand(IN_PLACE)
    error = hand.say([*JOINED, begin(), Abort(version=NEXT, reason="")])
    assert type(error) is TransportTimeout
    assert (hand.receiver.state, hand.receiver.is_dirty) == (ReceiverState.READY, False)
    assert hand.is_untouched()
    hand.transport.drop(hand.peer)
    hand.serve_honestly()
