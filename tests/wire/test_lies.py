"""Every lie of `worlds.lies`, told to whoever can be told it: it is refused, and changes nothing.

A frame that is read, the bucket of a live receiver on either back end, staged and in place, and
frames that go one way. Patch files are in `tests/files/test_lying_patches`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync.delta.bits import as_bits
from deltasync.errors import TransportTimeout, WireError
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode
from deltasync.wire.messages import Committed, Failed, Held, Prepared
from tests.wire import reference
from tests.wire.reference import Tile
from tests.worlds.lies import (
    BUCKETS,
    CODED,
    GAP,
    HEADERS,
    HONEST_TILES,
    RAW,
    STREAMS,
    Lie,
    compressed,
    gap,
)
from tests.worlds.peers import (
    JOINED,
    NEXT,
    OPTIONS,
    Hand,
    Said,
    begin,
    bucket,
    commit,
    layout,
    model,
    prepare,
    welcome,
    zipped,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
PAYLOADS = BUCKETS | GAP
IN_PLACE = OPTIONS.model_copy(update={"max_staged_bytes": 0})
SOME_HEADERS = {name: lie for name, lie in HEADERS.items() if " with" not in name}
KERNELS = pytest.mark.parametrize("kernels", ["torch", "triton"])

TRUE: dict[str, tuple[tuple[Tile, ...], Frame]] = {
    "as it is": (HONEST_TILES, bucket(*HONEST_TILES)),
    "zstd": (HONEST_TILES, zipped(compressed(RAW))),
    "other padding": (HONEST_TILES, bucket(data=RAW[:8] + b"\xff" * 8 + RAW[16:124] + b"\xff" * 4)),
    "gap": (CODED, gap()),
    "gap, packed": (CODED, gap(data=reference.coded(STREAMS, compressed))),
}
"""The honest buckets from which the lies differ, and what they change."""


def is_expected(error: object, lie: Lie) -> bool:
    return type(error) is lie.error or (lie.error is WireError and isinstance(error, WireError))


def weights() -> dict[str, Tensor]:
    return {name: one.data for name, one in model().named_parameters()}


def written(true: str) -> dict[str, Tensor]:
    """The weights after an honest bucket."""
    found = weights()
    lines = [as_bits(one).view(-1) for one in found.values()]
    for tile in TRUE[true][0]:
        places = range(len(tile.bits)) if tile.places is None else tile.places
        bits = torch.tensor(tile.bits, dtype=torch.int32).to(torch.int16)
        lines[tile.number][list(places)] = bits
    return found


def hand_of(kernels: str) -> Hand:
    """A receiver on that back end, on a GPU if there is one for it."""
    is_on_gpu = kernels == "triton" and torch.cuda.is_available()
    options = OPTIONS.model_copy(update={"kernels": kernels})
    return Hand(options, device="cuda" if is_on_gpu else "cpu")


def holds_bits(module: torch.nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(as_bits(one.data).cpu(), as_bits(expected[name]))
        for name, one in module.named_parameters()
    )


# Frames


@pytest.mark.parametrize("rule", sorted({name[:3] for name in HEADERS}))
def test_a_header_that_lies_is_refused(rule: str) -> None:
    for name, lie in HEADERS.items():
        if name.startswith(rule):
            with pytest.raises(lie.error) as raised:
                decode(lie.frames[0].header)
            assert type(raised.value) is lie.error, name


# Live receivers


def refuse(hand: Hand, talk: Iterable[Said], lie: Lie, name: str) -> None:
    """The receiver raises, tells the sender why, and hangs up."""
    error = hand.say(talk)
    assert is_expected(error, lie), (name, error)
    *_, last = hand.replies()
    assert isinstance(last, Failed), name
    why = "DirtyReceiver" if hand.receiver.is_dirty else type(error).__name__
    assert last.error == why, name
    assert not hand.transport.is_connected(hand.peer), name


def assert_unchanged(hand: Hand, name: str) -> None:
    assert hand.is_untouched(), name
    assert not hand.receiver.is_dirty, name
    hand.receiver.check_serving()


def take_a_good_sync(hand: Hand, true: str = "as it is", *, full: bool = False) -> None:
    begun = begin(base_version=None) if full else begin()
    said: list[Said] = [
        layout(),
        welcome(full=full),
        begun,
        TRUE[true][1],
        prepare(),
        commit(),
    ]
    error = hand.say(said)
    assert type(error) is TransportTimeout, error
    assert hand.receiver.version == NEXT
    assert not hand.receiver.is_dirty
    assert holds_bits(hand.module, written(true))
    assert [type(reply) for reply in hand.replies()] == [Held, Prepared, Committed]


@KERNELS
@pytest.mark.parametrize("true", TRUE)
def test_w15_honest_payloads_are_written_as_they_are(true: str, kernels: str) -> None:
    for full in (False, True):
        take_a_good_sync(hand_of(kernels), true, full=full)


@pytest.mark.promise(
    "Errors",
    "`VersionGap`, `WrongStream`, every `WireError`: nothing is written, and the receiver rejoins.",
)
@pytest.mark.promise(
    "Errors",
    "A GPU decodes and refuses the payloads that the host decodes and refuses, before "
    "anything is written.",
)
@KERNELS
@pytest.mark.parametrize("rule", sorted({name[:3] for name in PAYLOADS}))
def test_a_payload_that_lies_changes_nothing(rule: str, kernels: str) -> None:
    hand = hand_of(kernels)
    for name, lie in PAYLOADS.items():
        if name.startswith(rule):
            refuse(hand, [*JOINED, begin(), *lie.frames, prepare(len(lie.frames))], lie, name)
            assert_unchanged(hand, name)
    take_a_good_sync(hand)


@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
@pytest.mark.parametrize("rule", sorted({name[:3] for name in PAYLOADS}))
def test_in_place_nothing_of_a_bad_bucket_is_written(rule: str) -> None:
    """And nobody is dirty, unless a bucket before was written."""
    hand = Hand(IN_PLACE)
    for name, lie in PAYLOADS.items():
        if not name.startswith(rule):
            continue
        refuse(hand, [*JOINED, begin(), *lie.frames, prepare(len(lie.frames))], lie, name)
        if lie.late:
            assert hand.receiver.is_dirty
            assert not hand.is_untouched()
            hand = Hand(IN_PLACE)
        else:
            assert_unchanged(hand, name)


# The document and the tests


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    rules = re.findall(r"^- \*\*W(\d+)\*\*", DOCUMENT.read_text(), re.MULTILINE)
    text = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
    names = re.findall(r"^def test((?:_w\d\d)+)_", text, re.MULTILINE)
    tested = {int(number) for name in names for number in re.findall(r"\d\d", name)}
    tested |= {int(name[1:3]) for name in HEADERS | PAYLOADS}
    assert sorted(map(int, rules)) == sorted(tested) == list(range(1, len(rules) + 1))
