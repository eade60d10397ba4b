"""Broken and hostile senders: typed errors, not one bit changed, and honest ones are heard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltasync import DeltaSyncError
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    DirtyReceiver,
    InvalidIndices,
    InvalidTable,
    LayoutMismatch,
    LimitExceeded,
    MalformedMessage,
    PeerLost,
    ProtocolViolation,
    Refused,
    SyncAborted,
    TransportTimeout,
    TruncatedFrame,
    UnknownCodec,
    UnknownDtype,
    UnsupportedVersion,
    VersionGap,
    WireError,
    WrongStream,
)
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.transports.base import Frame
from deltasync.wire import messages
from deltasync.wire.compression import compress
from deltasync.wire.frame import decode, encode, join_header
from deltasync.wire.messages import (
    Abort,
    Committed,
    Failed,
    Finish,
    Held,
    Message,
    Prepared,
    Upcoming,
    entries,
)
from tests.worlds.peers import (
    BASE,
    DENSE,
    JOINED,
    NEXT,
    OPTIONS,
    SPARSE,
    SPECS,
    STAGED,
    Hand,
    Row,
    Said,
    begin,
    bucket,
    commit,
    frame,
    layout,
    packed,
    prepare,
    said,
    tensor,
    welcome,
    zipped,
)


def flipped(message: Message, byte: int) -> Frame:
    header = bytearray(encode(message))
    header[byte] ^= 1
    return Frame(bytes(header))


def lying(row: Row = SPARSE, **lies: int) -> list[Said]:
    return [*JOINED, begin(), bucket(replace(row, lies=lies))]


def indexed(*indices: int, span: int = 40) -> list[Said]:
    return [*JOINED, begin(), bucket(Row(indices=indices, span=span))]


RAW = packed(SPARSE, DENSE)
ANNOUNCED = bucket(data=RAW, num_rows=2).header

CASES: dict[str, tuple[list[Said], type[DeltaSyncError]]] = {
    # The header.
    "empty-looking header": ([Frame(b"\0")], TruncatedFrame),
    "random header": ([Frame(bytes((7 * i + 3) % 256 for i in range(99)))], BadMagic),
    "truncated header": ([*JOINED, Frame(encode(begin())[:-1])], TruncatedFrame),
    "extended header": ([*JOINED, Frame(encode(begin()) + b" ")], TruncatedFrame),
    "flipped bit in the message": ([*JOINED, flipped(begin(), 40)], ChecksumMismatch),
    "flipped bit in the magic": ([*JOINED, flipped(begin(), 0)], BadMagic),
    "another format version": ([*JOINED, flipped(begin(), 4)], UnsupportedVersion),
    "flags": ([*JOINED, flipped(begin(), 6)], UnsupportedVersion),
    "not JSON": ([*JOINED, Frame(join_header(b"{"))], MalformedMessage),
    "not UTF-8": ([*JOINED, Frame(join_header(b'{"kind": "\xff"}'))], MalformedMessage),
    "nested too deep": ([*JOINED, Frame(join_header(b"[" * 100_000))], MalformedMessage),
    # The message.
    "unknown kind": ([*JOINED, said(begin(), kind="exec")], MalformedMessage),
    "half a character": (
        [Frame(join_header(b'{"\\ud800": 1, "kind": "welcome"}'))],
        MalformedMessage,
    ),
    "no kind": ([*JOINED, Frame(join_header(b"{}"))], MalformedMessage),
    "unknown field": ([*JOINED, said(begin(), extra=1)], MalformedMessage),
    "number as text": ([*JOINED, said(begin(), version="6")], MalformedMessage),
    "negative version": ([*JOINED, said(begin(), version=-1)], MalformedMessage),
    "unbounded number": ([*JOINED, said(begin(), dense_bytes=1 << 63)], MalformedMessage),
    "endless timeout": ([*JOINED, said(begin(), timeout_s=float("inf"))], MalformedMessage),
    "unknown compression": (
        [*JOINED, begin(), said(decode(bucket(SPARSE).header)[0], compression="lzma")],
        MalformedMessage,
    ),
    "payload that was not declared": (
        [*JOINED, Frame(encode(begin()), tensor(b"12345678"))],
        TruncatedFrame,
    ),
    "payload without a bucket": ([*JOINED, frame(begin(), b"12345678")], MalformedMessage),
    "a receiver's message": (
        [*JOINED, Held(digest="0" * 16, parts=(), half_written=False, max_staged_bytes=0)],
        ProtocolViolation,
    ),
    # Joining.
    "unknown dtype": ([said(layout(), parameters=[[["a"], [8, 5], 99]])], UnknownDtype),
    "layout names a name twice": (
        [said(layout(), parameters=[[["a"], [8, 5], 1], [["a"], [8, 5], 1]])],
        MalformedMessage,
    ),
    "layout of another model": (
        [layout(parameters=entries((replace(SPECS[0], names=("c",)), SPECS[1])))],
        LayoutMismatch,
    ),
    "layout of another shape": (
        [layout(parameters=entries((replace(SPECS[0], shape=(40,)), SPECS[1])))],
        LayoutMismatch,
    ),
    "layout of a gigantic shape": (
        [layout(parameters=entries((replace(SPECS[0], shape=(1 << 61,)), SPECS[1])))],
        LayoutMismatch,
    ),
    "layout of another dtype": (
        [layout(parameters=entries((replace(SPECS[0], dtype=SPECS[1].dtype), SPECS[1])))],
        LayoutMismatch,
    ),
    "layout without a parameter": ([layout(parameters=entries(SPECS[:1]))], LayoutMismatch),
    "layout twice": ([layout(), layout()], ProtocolViolation),
    "layout for a member": ([*JOINED, layout()], ProtocolViolation),
    "welcome before a layout": ([welcome()], ProtocolViolation),
    "welcome twice": ([*JOINED, welcome()], ProtocolViolation),
    "begin before a welcome": ([layout(), begin()], ProtocolViolation),
    "upcoming before a welcome": ([layout(), Upcoming(version=NEXT)], ProtocolViolation),
    # Order and versions.
    "upcoming while staging": ([*JOINED, begin(), Upcoming(version=NEXT)], ProtocolViolation),
    "begin while staging": ([*JOINED, begin(), begin()], ProtocolViolation),
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
    "bucket repeated": ([*STAGED, bucket(SPARSE, DENSE)], ProtocolViolation),
    "bucket skipped": ([*JOINED, begin(), bucket(SPARSE, sequence=1)], ProtocolViolation),
    "buckets reordered": (
        [*JOINED, begin(), bucket(DENSE, sequence=1), bucket(SPARSE, sequence=0)],
        ProtocolViolation,
    ),
    "prepare before a begin": ([*JOINED, prepare(0)], ProtocolViolation),
    "prepare of more buckets": ([*STAGED, prepare(2)], ProtocolViolation),
    "prepare of fewer buckets": ([*STAGED, prepare(0)], ProtocolViolation),
    "prepare of another version": ([*STAGED, prepare(version=7)], ProtocolViolation),
    "prepare twice": ([*STAGED, prepare(), prepare()], ProtocolViolation),
    "bucket after prepare": (
        [*JOINED, begin(), bucket(SPARSE), prepare(), bucket(DENSE, sequence=1)],
        ProtocolViolation,
    ),
    "commit without a begin": ([*JOINED, commit()], ProtocolViolation),
    "commit without prepare": ([*STAGED, commit()], ProtocolViolation),
    "commit of another version": ([*STAGED, prepare(), commit(NEXT + 1)], ProtocolViolation),
    "finish without a commit": (
        [*STAGED, prepare(), Finish(version=NEXT, undo=())],
        ProtocolViolation,
    ),
    "finish of another version": ([*JOINED, Finish(version=99, undo=())], ProtocolViolation),
    "finish that undoes nothing": (
        [*JOINED, Finish(version=BASE, undo=("engine",))],
        ProtocolViolation,
    ),
    "abort of another version": ([*STAGED, Abort(version=99, reason="")], ProtocolViolation),
    "commit after abort": (
        [*STAGED, prepare(), Abort(version=NEXT, reason=""), commit()],
        ProtocolViolation,
    ),
    "a sync that stops": ([*STAGED], TransportTimeout),
    "a sync that stops before the decision": ([*STAGED, prepare()], TransportTimeout),
    # The payload.
    "payload shorter than declared": (
        [*JOINED, begin(), Frame(ANNOUNCED, tensor(RAW[:-1]))],
        TruncatedFrame,
    ),
    "payload longer than declared": (
        [*JOINED, begin(), Frame(ANNOUNCED, tensor(RAW + b"1"))],
        TruncatedFrame,
    ),
    "no payload": ([*JOINED, begin(), Frame(ANNOUNCED)], TruncatedFrame),
    "raw bytes that are not the payload's": (
        [*JOINED, begin(), bucket(SPARSE, raw_bytes=1)],
        MalformedMessage,
    ),
    "payload truncated": ([*JOINED, begin(), bucket(data=RAW[:-1], num_rows=2)], TruncatedFrame),
    "payload extended": ([*JOINED, begin(), bucket(data=RAW + b"1", num_rows=2)], TruncatedFrame),
    "empty payload": ([*JOINED, begin(), bucket(data=b"")], TruncatedFrame),
    "half a row": ([*JOINED, begin(), bucket(data=RAW[:20])], TruncatedFrame),
    "fewer rows than there are": ([*JOINED, begin(), bucket(SPARSE, DENSE, num_rows=1)], WireError),
    "more rows than there are": ([*JOINED, begin(), bucket(SPARSE, DENSE, num_rows=9)], WireError),
    "2^32 rows": ([*JOINED, begin(), bucket(SPARSE, num_rows=(1 << 32) - 1)], TruncatedFrame),
    "payload over the limit": ([*JOINED, begin(), bucket(data=bytes(4097))], LimitExceeded),
    "inflates over the limit": (
        [*JOINED, begin(), zipped(compress(bytes(4097)), raw_bytes=4097)],
        LimitExceeded,
    ),
    "inflates beyond what it declares": (
        [*JOINED, begin(), zipped(compress(bytes(1 << 24)), raw_bytes=len(RAW))],
        LimitExceeded,
    ),
    "inflates to less": ([*JOINED, begin(), zipped(compress(RAW), raw_bytes=999)], TruncatedFrame),
    "not zstd": ([*JOINED, begin(), zipped(b"not zstd", raw_bytes=8)], WireError),
    "zstd cut off": (
        [*JOINED, begin(), zipped(compress(RAW)[:-3], raw_bytes=len(RAW), num_rows=2)],
        WireError,
    ),
    "zstd and something after": (
        [*JOINED, begin(), zipped(compress(RAW) + b"12", raw_bytes=len(RAW), num_rows=2)],
        WireError,
    ),
    # The table.
    "unknown parameter": (lying(parameter=2), InvalidTable),
    "parameter 2^32 - 1": (lying(parameter=(1 << 32) - 1), InvalidTable),
    "another parameter's row": (lying(parameter=1), InvalidTable),
    "unknown row kind": (lying(kind=3), InvalidTable),
    "reserved byte": (lying(reserved=1), InvalidTable),
    "unknown index codec": (lying(index_codec=2), UnknownCodec),
    "dense row with an index codec": (lying(DENSE, index_codec=1), UnknownCodec),
    "unknown value codec": (lying(value_codec=3), UnknownCodec),
    "start beyond the parameter": (lying(start=1), InvalidTable),
    "start that wraps around": (lying(start=(1 << 64) - 1), InvalidTable),
    "span beyond the parameter": (lying(span=41), InvalidTable),
    "span that wraps around": (lying(span=(1 << 64) - 1), InvalidTable),
    "span of nothing": (lying(span=0), InvalidTable),
    "count of nothing": (lying(count=0), InvalidTable),
    "count beyond the span": (lying(count=41), InvalidTable),
    "count that wraps around": (lying(count=(1 << 64) - 1), InvalidTable),
    "one element fewer": (lying(count=2), InvalidTable),
    "one element more": (lying(count=4), InvalidTable),
    "dense row of a part of its span": (lying(DENSE, count=29), InvalidTable),
    "index bytes that lie": (lying(index_bytes=8), InvalidTable),
    "value bytes that lie": (lying(value_bytes=1 << 60), InvalidTable),
    "rows out of order": ([*JOINED, begin(), bucket(DENSE, SPARSE)], InvalidTable),
    "rows overlap": ([*JOINED, begin(), bucket(SPARSE, SPARSE)], InvalidTable),
    "rows overlap by one": (
        [*JOINED, begin(), bucket(Row(span=10), Row(start=9, span=31))],
        InvalidTable,
    ),
    "rows overlap across buckets": (
        [*JOINED, begin(), bucket(SPARSE), bucket(SPARSE, sequence=1)],
        InvalidTable,
    ),
    "rows out of order across buckets": (
        [*JOINED, begin(), bucket(DENSE), bucket(SPARSE, sequence=1)],
        InvalidTable,
    ),
    # The indices.
    "index out of range": (indexed(1, 40), InvalidIndices),
    "index out of its span": (indexed(1, 20, span=20), InvalidIndices),
    "largest index": (indexed(1, (1 << 31) - 1), InvalidIndices),
    "negative index": (indexed(-1, 3), InvalidIndices),
    "smallest index": (indexed(-(1 << 31), 3), InvalidIndices),
    "negative index at the end": (indexed(3, -1), InvalidIndices),
    "unsorted indices": (indexed(5, 4, 9), InvalidIndices),
    "repeated index": (indexed(4, 4, 9), InvalidIndices),
    "unsorted indices after good rows of another item size": (
        [*JOINED, begin(), bucket(SPARSE, Row(parameter=1, indices=(5, 4), span=30))],
        InvalidIndices,
    ),
    # Memory.
    "begin of less than its buckets": (
        [*JOINED, begin(sparse_bytes=8, dense_bytes=8), bucket(SPARSE, DENSE)],
        LimitExceeded,
    ),
    "begin of nothing": (
        [*JOINED, begin(sparse_bytes=0, dense_bytes=0), bucket(SPARSE)],
        LimitExceeded,
    ),
    "begin of 2^62 bytes": ([*JOINED, begin(dense_bytes=1 << 62)], LimitExceeded),
    "begin of 2^62 bytes of indices": ([*JOINED, begin(sparse_bytes=1 << 62)], LimitExceeded),
    "full sync of 2^62 bytes": (
        [layout(), welcome(full=True), begin(base_version=None, dense_bytes=1 << 62)],
        LimitExceeded,
    ),
}


@pytest.mark.promise(
    "Errors",
    "`VersionGap`, `WrongStream`, every `WireError`: nothing is written, and the receiver rejoins.",
)
@pytest.mark.parametrize("name", CASES)
def test_a_bad_sender_changes_no_bit_and_the_receiver_rejoins(name: str) -> None:
    talk, expected = CASES[name]
    hand = Hand()
    error = hand.say(talk)
    assert isinstance(error, expected), repr(error)
    if expected is not WireError:
        assert type(error) is expected
    assert hand.is_untouched()
    assert not hand.receiver.is_dirty
    hand.receiver.check_serving()
    *_, last = hand.replies()
    assert isinstance(last, Failed)
    assert last.error == type(error).__name__
    assert not hand.transport.is_connected(hand.peer)
    hand.serve_honestly()


@pytest.mark.promise("Errors", "In place, every mixture of versions is detected.")
@pytest.mark.parametrize("name", CASES)
def test_a_bad_sender_leaves_no_mixture_unnoticed_where_syncs_are_written_in_place(
    name: str,
) -> None:
    talk, expected = CASES[name]
    hand = Hand(OPTIONS.model_copy(update={"max_staged_bytes": 0}))
    error = hand.say(talk)
    assert isinstance(
        error, DeltaSyncError if expected is LimitExceeded else expected | SyncAborted
    )
    assert hand.is_untouched() or hand.receiver.is_dirty
    hand.serve_honestly()


@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name for name in CASES if issubclass(CASES[name][1], WireError)])
def test_bytes_that_break_the_format_write_nothing_of_their_bucket_in_place(
    name: str, world: int
) -> None:
    """And make nobody dirty, unless a bucket before was written."""
    talk, expected = CASES[name]
    hand = Hand(OPTIONS.model_copy(update={"max_staged_bytes": 0}), world=world)
    error = hand.say(talk)
    assert isinstance(error, expected), repr(error)
    is_written = name.endswith("across buckets")
    assert hand.receiver.is_dirty is is_written
    assert hand.is_untouched() is not is_written


@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
def test_in_place_an_earlier_bucket_is_written_and_the_receiver_refuses_to_serve() -> None:
    hand = Hand(OPTIONS.model_copy(update={"max_staged_bytes": 0}))
    small = begin(sparse_bytes=18, dense_bytes=0)  # the first bucket is all that it declares
    error = hand.say([*JOINED, small, bucket(SPARSE), bucket(DENSE, sequence=1)])
    assert type(error) is LimitExceeded
    now = [as_bits(parameter.data) for parameter in hand.module.parameters()]
    expected = [bits.clone() for bits in hand.before]
    expected[0].view(-1)[SPARSE.positions] = SPARSE.bits
    assert all(torch.equal(a, b) for a, b in zip(expected, now, strict=True))
    with pytest.raises(DirtyReceiver):
        hand.receiver.check_serving()
    hand.serve_honestly()


@pytest.mark.parametrize("full", [False, True])
def test_a_legal_sync_by_hand_writes_what_it_says_and_no_more(full: bool) -> None:
    """That the cases above fail for the reason they name."""
    hand = Hand()
    begun = begin(base_version=None) if full else begin()
    finish = Finish(version=NEXT, undo=())
    error = hand.say(
        [layout(), welcome(full=full), begun, bucket(SPARSE, DENSE), prepare(), commit(), finish]
    )
    assert isinstance(error, TransportTimeout)
    assert hand.receiver.version == NEXT
    expected = [bits.clone() for bits in hand.before]
    for row in (SPARSE, DENSE):
        expected[row.parameter].view(-1)[row.positions] = row.bits
    now = [as_bits(parameter.data) for parameter in hand.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, now, strict=True))
    assert [type(reply) for reply in hand.replies()] == [Held, Prepared, Committed]


def test_every_flipped_bit_of_a_header_is_found() -> None:
    hand = Hand()
    header = encode(begin())
    for bit in [*range(8 * 24), *range(8 * 24, 8 * len(header), 5)]:
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        error = hand.say([*JOINED, Frame(bytes(damaged))])
        assert isinstance(error, WireError), bit
        assert hand.is_untouched()
    hand.serve_honestly()


@pytest.mark.parametrize("cut", range(0, len(RAW), 7))
def test_a_payload_cut_anywhere_is_found(cut: int) -> None:
    hand = Hand()
    error = hand.say([*JOINED, begin(), bucket(data=RAW[:cut], num_rows=2), prepare(), commit()])
    assert type(error) is TruncatedFrame
    assert hand.is_untouched()


def test_a_link_that_ends_within_a_sync_changes_nothing() -> None:
    hand = Hand()
    assert isinstance(hand.say(STAGED[:2]), TransportTimeout)
    hand.transport.drop(hand.peer)
    with pytest.raises(PeerLost):
        hand.receiver.receive_weights(timeout_s=0)
    assert hand.is_untouched()
    hand.serve_honestly()


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


def test_an_aborted_sync_leaves_a_receiver_that_was_dirty_as_it_was_and_waiting() -> None:
    """Nothing was written: the sender tries again, without whoever failed."""
    hand = Hand(OPTIONS.model_copy(update={"stall_timeout_s": 20.0}))
    hand.receiver._session.on("corrupted")
    began, gave_up = begin(base_version=None), Abort(version=NEXT, reason="")
    error = hand.say([layout(), welcome(full=True), began, gave_up])
    assert type(error) is TransportTimeout
    assert hand.receiver.is_dirty
    assert hand.receiver.state is ReceiverState.WAITING
    hand.transport.drop(hand.peer)
    hand.serve_honestly()


def test_a_sync_aborted_while_it_is_written_in_place_is_dirty_and_it_rejoins_at_once() -> None:
    hand = Hand(OPTIONS.model_copy(update={"stall_timeout_s": 20.0, "max_staged_bytes": 0}))
    error = hand.say([*STAGED, Abort(version=NEXT, reason="")])
    assert type(error) is SyncAborted
    assert hand.receiver.is_dirty
    hand.serve_honestly()


@pytest.mark.promise("All or nothing", "A receiver that has written nothing is not dirty.")
def test_a_sync_aborted_before_it_is_written_in_place_costs_nothing() -> None:
    hand = Hand(OPTIONS.model_copy(update={"max_staged_bytes": 0}))
    error = hand.say([*JOINED, begin(), Abort(version=NEXT, reason="")])
    assert type(error) is TransportTimeout
    assert (hand.receiver.state, hand.receiver.is_dirty) == (ReceiverState.READY, False)
    assert hand.is_untouched()
    hand.transport.drop(hand.peer)
    hand.serve_honestly()
