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
    ProtocolViolation,
    Refused,
    SyncAborted,
    TransportTimeout,
    VersionGap,
    WrongStream,
)
from deltasync.transports.base import Frame
from deltasync.wire import messages
from deltasync.wire.messages import Abort, Failed, Finish, Shares, entries
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
    welcome,
)

SHARES = frame(Shares(version=NEXT, num_shares=1), reference.SHARE.pack(0, 0, 0, 1, 40, 40))
IN_PLACE = OPTIONS.model_copy(update={"max_staged_bytes": 0})
CASES: dict[str, tuple[list[Said], type[DeltaSyncError]]] = {
    # Joining.
    "layout of a gigantic parameter that is not held": (
        [layout(parameters=entries((*SPECS, replace(SPECS[0], names=("d",), shape=(1 << 37,)))))],
        LayoutMismatch,
    ),
    # Order and versions.
    "another stream": ([*JOINED, begin(stream_id="other")], WrongStream),
    "another layout": ([*JOINED, begin(layout_hash="f" * 64)], ProtocolViolation),
    "older base": ([*JOINED, begin(base_version=BASE - 1)], VersionGap),
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
    "bucket after prepare": (
        [*JOINED, begin(), bucket(SPARSE), prepare(), bucket(DENSE, sequence=1)],
        ProtocolViolation,
    ),
    "prepare of more buckets": ([*STAGED, prepare(2)], ProtocolViolation),
    "prepare of fewer buckets": ([*STAGED, prepare(0)], ProtocolViolation),
    "commit of another version": ([*STAGED, prepare(), commit(NEXT + 1)], ProtocolViolation),
    "abort of another version": ([*STAGED, Abort(version=99, reason="")], ProtocolViolation),
    "a sync that stops": ([*STAGED, prepare()], TransportTimeout),
    # Memory.
    "payload over the limit": (
        [*JOINED, begin(), bucket(SPARSE, whole=1 << 29, compression="zstd")],
        LimitExceeded,
    ),
    "begin of less than its buckets": (
        [*JOINED, begin(payload_bytes=127), bucket(SPARSE, DENSE)],
        LimitExceeded,
    ),
    "begin of fewer places than its buckets": (
        [*JOINED, begin(places=2), bucket(SPARSE, DENSE)],
        LimitExceeded,
    ),
    "begin of more places than elements": ([*JOINED, begin(places=74)], LimitExceeded),
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


@pytest.mark.promise("Errors", "`Refused` says why.")
def test_a_refusal_is_told_with_its_reason() -> None:
    hand = Hand()
    error = hand.say([messages.Refused(error="ConfigError", reason="no room")])
    assert isinstance(error, Refused)
    assert (error.kind, error.message) == ("ConfigError", "no room")
    hand.serve_honestly()
