"""Sequences of messages, nearly legal: only a whole legal sync changes a bit.

What may be written is told by a reference that knows only the form of such a sync.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltasync import ReceiverOptions
from deltasync.delta.bits import as_bits
from deltasync.transports.base import Frame
from deltasync.wire.messages import Abort, Committed, Finish, Upcoming
from tests.worlds.peers import (
    BASE,
    DENSE,
    JOINED,
    NEXT,
    SPARSE,
    Hand,
    Row,
    Said,
    begin,
    bucket,
    commit,
    layout,
    prepare,
    welcome,
)

versions = st.integers(BASE, BASE + 4)
PARTS = [(SPARSE,), (DENSE,), (SPARSE, DENSE), (Row(indices=(2, 7), span=12), DENSE)]
LYING = [(Row(indices=(3, 40)),), (Row(lies={"span": 99}),), (DENSE, SPARSE), (SPARSE, SPARSE)]


@dataclass(frozen=True)
class Sent:
    """A message, and the rows that it carries if they are legal."""

    message: Said
    kind: str
    fields: tuple[int | None, ...] = ()
    rows: tuple[Row, ...] | None = ()


def a_begin(version: int, base: int | None) -> Sent:
    message = begin(version=version, base_version=base)
    return Sent(message, "begin", (version, base))


def a_bucket(version: int, sequence: int, rows: tuple[Row, ...]) -> Sent:
    legal = rows if rows in PARTS else None
    message = bucket(*rows, version=version, sequence=sequence)
    return Sent(message, "bucket", (version, sequence), legal)


def a_prepare(version: int, num_buckets: int) -> Sent:
    return Sent(prepare(num_buckets, version), "prepare", (version, num_buckets))


def a_commit(version: int) -> Sent:
    return Sent(commit(version), "commit", (version,))


def a_sync(version: int, base: int, parts: list[tuple[Row, ...]]) -> list[Sent]:
    buckets = [a_bucket(version, n, rows) for n, rows in enumerate(parts)]
    prepared = a_prepare(version, len(parts))
    return [a_begin(version, base), *buckets, prepared, a_commit(version)]


splits: st.SearchStrategy[list[tuple[Row, ...]]] = st.sampled_from(
    [*([part] for part in PARTS), [], [(SPARSE,), (DENSE,)]]
)
anything = st.one_of(
    st.builds(a_begin, versions, st.one_of(st.none(), versions)),
    st.builds(a_bucket, versions, st.integers(0, 2), st.sampled_from(PARTS + LYING)),
    st.builds(a_prepare, versions, st.integers(0, 3)),
    st.builds(a_commit, versions),
    versions.map(lambda v: Sent(Finish(version=v, undo=()), "finish", (v,))),
    versions.map(lambda v: Sent(Upcoming(version=v), "upcoming", (v,))),
    versions.map(lambda v: Sent(Abort(version=v, reason=""), "abort", (v,))),
    st.sampled_from([Sent(m, "other") for m in (layout(), welcome(), welcome(full=True))]),
    st.binary(min_size=1, max_size=40).map(lambda data: Sent(Frame(data), "other")),
)


@st.composite
def talks(draw: st.DrawFn) -> list[Sent]:
    """Legal syncs in a row, and messages put in, taken out, repeated or exchanged."""
    talk = [
        sent
        for version in range(NEXT, NEXT + draw(st.integers(1, 3)))
        for sent in a_sync(version, version - 1, draw(splits))
    ]
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.integers(0, len(talk) - 1))
        match draw(st.sampled_from(["put in", "take out", "repeat", "exchange"])):
            case "put in":
                talk.insert(where, draw(anything))
            case "take out" if len(talk) > 1:
                talk.pop(where)
            case "repeat":
                talk.insert(where, talk[where])
            case "exchange":
                talk[where], talk[-1] = talk[-1], talk[where]
    return talk


def syncs_within(talk: list[Sent]) -> list[tuple[int, list[Row]]]:
    """(version, rows) of every whole legal sync that stands in one piece, in order of versions."""
    held, found = BASE, []
    for n, first in enumerate(talk):
        if first.kind != "begin" or first.fields[1] != held:
            continue
        version = first.fields[0]
        parts: list[tuple[Row, ...]] = []
        for sent in talk[n + 1 :]:
            if sent.kind != "bucket" or sent.fields != (version, len(parts)) or sent.rows is None:
                break
            parts.append(sent.rows)
        rest = [(s.kind, s.fields) for s in talk[n + 1 + len(parts) : n + 3 + len(parts)]]
        rows = [row for part in parts for row in part]
        is_whole = rest == [("prepare", (version, len(parts))), ("commit", (version,))]
        if is_whole and version is not None and version > held and is_ordered(rows):
            held = version
            found.append((version, rows))
    return found


def is_ordered(rows: list[Row]) -> bool:
    ends = [(row.parameter, row.start + row.span) for row in rows]
    starts = [(row.parameter, row.start) for row in rows]
    return all(end <= start for end, start in zip(ends, starts[1:], strict=False))


LEGAL = a_sync(NEXT, BASE, [(SPARSE,), (DENSE,)])
LOST = [LEGAL[0], LEGAL[2], *LEGAL[3:]]
TWICE = [*LEGAL[:2], a_bucket(NEXT, 0, (DENSE,)), *LEGAL[3:]]
OTHER_RUN = [Sent(begin(stream_id="other"), "other"), *LEGAL[1:]]


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@settings(max_examples=200)
@given(talks())
@example(a_sync(NEXT, BASE - 1, [(SPARSE,)]))
@example(a_sync(NEXT + 1, NEXT, [(SPARSE,)]))
@example(a_sync(BASE, BASE, [(SPARSE,)]))
@example(OTHER_RUN)
@example(TWICE)
@example(LOST)
def test_nothing_but_a_whole_legal_sync_changes_a_bit(talk: list[Sent]) -> None:
    hand = Hand(ReceiverOptions(stall_timeout_s=0.001))
    hand.say([*JOINED, *(sent.message for sent in talk)])
    committed = [r.version for r in hand.replies() if isinstance(r, Committed)]
    possible = syncs_within(talk)[: len(committed)]
    assert committed == [version for version, _ in possible]
    expected = [bits.clone() for bits in hand.before]
    for _, rows in possible:
        for row in rows:
            expected[row.parameter].view(-1)[row.positions] = row.bits
    now = [as_bits(parameter.data) for parameter in hand.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, now, strict=True))
    assert not hand.receiver.is_dirty


@settings(max_examples=20)
@given(st.integers(1, 3), splits)
def test_legal_syncs_in_a_row_are_all_written(count: int, parts: list[tuple[Row, ...]]) -> None:
    """That the reference above does not hold for want of any sync."""
    hand = Hand(ReceiverOptions(stall_timeout_s=0.001))
    talk = [s for v in range(NEXT, NEXT + count) for s in a_sync(v, v - 1, parts)]
    hand.say([*JOINED, *(sent.message for sent in talk)])
    assert hand.receiver.version == BASE + count == syncs_within(talk)[-1][0]
