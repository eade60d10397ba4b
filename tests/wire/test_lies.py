"""Every lie of `worlds.lies`, told to whoever can be told it: it is refused, and changes nothing.

A frame that is read, the bucket of a live receiver on either back end, staged and in place, and a
patch file, which an object of a store is too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync.delta.bits import as_bits
from deltasync.delta.patch import check_indices
from deltasync.dtypes import BY_NAME
from deltasync.errors import (
    DeltaSyncError,
    DigestMismatch,
    DirtyReceiver,
    InvalidTable,
    ProtocolViolation,
    SyncError,
    TransportTimeout,
    TruncatedFrame,
    VersionGap,
    WireError,
    WrongStream,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.frame_file import FrameFile
from deltasync.files.patch_file import PatchFile, apply_patch_file
from deltasync.sync.protocol.one_way import OneWayReader
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import (
    Committed,
    Failed,
    Finish,
    Held,
    ParameterSpec,
    Prepared,
    Sealed,
    entries,
    layout_hash,
)
from tests.files.saved import holds, save
from tests.golden.make_golden import FOLDER, MESSAGES
from tests.wire import reference
from tests.worlds.coded_lies import (
    BLOCK,
    CLASS,
    CODED,
    DENSE_CODED,
    GAP,
    OLD,
    RAW_CODECS,
    REFERENCE_KINDS,
    Coded,
    coded,
    unsigned,
)
from tests.worlds.lies import ALL, BUCKETS, HEADERS, RAW, Lie, header_of
from tests.worlds.peers import (
    BASE,
    DENSE,
    JOINED,
    NEXT,
    OPTIONS,
    SPARSE,
    Hand,
    Row,
    Said,
    begin,
    bucket,
    commit,
    layout,
    model,
    prepare,
    welcome,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
PAYLOADS = BUCKETS | CODED
SOME_HEADERS = {name: lie for name, lie in HEADERS.items() if " with" not in name}
every_rule = pytest.mark.parametrize("rule", sorted({name[:3] for name in PAYLOADS}))
FINISH = Finish(version=NEXT, undo=())
IN_PLACE = OPTIONS.model_copy(update={"max_staged_bytes": 0})
KERNELS = pytest.mark.parametrize("kernels", ["torch", "triton"])

PADDED = RAW[:108] + b"\xff" * 4 + RAW[112:]  # rule W10
ALL_OF_B = replace(DENSE_CODED, indices=tuple(range(30)), codecs=RAW_CODECS)
TRUE: dict[str, Frame] = {
    "raw": bucket(SPARSE, DENSE),
    "gap": coded(Coded(codecs=GAP), DENSE_CODED),
    "block": coded(Coded(codecs=BLOCK), ALL_OF_B),  # which a device decodes
    "block and dense": coded(Coded(codecs=BLOCK), DENSE_CODED),
    "class": coded(Coded(codecs=CLASS), DENSE_CODED),
    "other padding": bucket(data=PADDED, num_rows=2),
    "coded, as it is": coded(Coded(codecs=RAW_CODECS), DENSE_CODED),
}
"""The honest buckets from which the lies differ."""


def is_expected(error: object, lie: Lie) -> bool:
    return type(error) is lie.error or (lie.error is WireError and isinstance(error, WireError))


def weights() -> dict[str, Tensor]:
    return {name: one.data for name, one in model().named_parameters()}


def written(true: str) -> dict[str, Tensor]:
    """The weights after an honest bucket."""
    found, new = weights(), [SPARSE.bits.tolist(), DENSE.bits.tolist()]
    rows: list[Row] = [SPARSE, DENSE]
    if true not in ("raw", "other padding"):
        rows, new = [Coded(), DENSE_CODED], [Coded().new, DENSE_CODED.new]
    for tensor, row, bits in zip(found.values(), rows, new, strict=True):
        line = as_bits(tensor).view(-1)
        line[row.positions] = torch.tensor(bits).to(line.dtype)
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


def test_what_the_headers_differ_from_is_read() -> None:
    for message in ALL.values():
        decode(header_of(message, message.get("raw_bytes", 0)))
    largest = {"raw_bytes": 1 << 30, "compression": "zstd"}
    assert decode(header_of(ALL["bucket"] | largest, 1 << 30))[1] == 1 << 30
    shapes = [[1] * 64, [2**62], [2**31, 2**31], [0, 2**62, 1], []]
    parameters = [[[f"p{n}"], shape, 1] for n, shape in enumerate(shapes)]
    decode(header_of(ALL["layout"] | {"parameters": parameters}))


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


def take_a_good_sync(hand: Hand, true: str = "raw", *, full: bool = False) -> None:
    begun = begin(base_version=None) if full else begin()
    said: list[Said] = [
        layout(),
        welcome(full=full),
        begun,
        TRUE[true],
        prepare(),
        commit(),
        FINISH,
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
def test_a_header_that_lies_changes_nothing() -> None:
    hand = Hand()
    for name, lie in SOME_HEADERS.items():
        refuse(hand, [*JOINED, begin(), *lie.frames], lie, name)
        assert_unchanged(hand, name)
    hand.serve_honestly()


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
@every_rule
def test_a_payload_that_lies_changes_nothing(rule: str, kernels: str) -> None:
    hand = hand_of(kernels)
    for name, lie in PAYLOADS.items():
        if name.startswith(rule):
            refuse(hand, [*JOINED, begin(), *lie.frames, prepare(len(lie.frames))], lie, name)
            assert_unchanged(hand, name)
    take_a_good_sync(hand)


@pytest.mark.promise("Errors", "In place, every mixture of versions is detected.")
@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
@every_rule
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
            with pytest.raises(DirtyReceiver):
                hand.receiver.check_serving()
            hand = Hand(IN_PLACE)
        else:
            assert_unchanged(hand, name)


# Files


def bytes_of(*said: Said) -> bytes:
    frames = [one if isinstance(one, Frame) else Frame(encode(one)) for one in said]
    return b"".join(
        frame.header + (b"" if frame.payload is None else frame.payload.numpy().tobytes())
        for frame in frames
    )


def digest_of(bits: list[list[int]]) -> str:
    total = 0
    for name, one, kind in zip("ab", bits, REFERENCE_KINDS, strict=True):
        own = [unsigned(number, kind) for number in one]
        total += reference.digest(reference.seed(name), range(len(own)), own)
    return f"{total % 2**64:016x}"


def one_way(frames: Iterable[Frame], *, digest: str = "0" * 16) -> bytes:
    """The frames of one sync as they stand in a file."""
    frames = list(frames)
    first = layout(digest=digest_of(OLD)), begin()
    return bytes_of(*first, *frames, prepare(len(frames)), sealed(digest))


def digest_after(true: str) -> str:
    return digest_of([as_bits(one).view(-1).tolist() for one in written(true).values()])


def is_whole(lie: Lie) -> bool:
    """Whether a file goes on, behind each frame, where its lengths say so."""
    for frame in lie.frames:
        if len(frame.header) < 24:
            return False
        message, _, payload = struct.unpack_from("<IIQ", frame.header, 8)
        found = len(frame.header) + (0 if frame.payload is None else len(frame.payload))
        if 24 + message + payload != found:
            return False
    return True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(weights(), tmp_path_factory.mktemp("checkpoint") / "old")


@pytest.mark.parametrize("true", TRUE)
def test_what_the_patches_differ_from_is_applied(
    true: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "patch").write_bytes(one_way([TRUE[true]], digest=digest_after(true)))
    apply_patch_file(PatchFile(tmp_path / "patch"), Checkpoint(checkpoint), tmp_path / "out")
    assert holds(tmp_path / "out", written(true))


@pytest.mark.promise(
    "Errors",
    "`VersionGap`, `WrongStream`, every `WireError`: nothing is written, and the receiver rejoins.",
)
@pytest.mark.parametrize("group", [SOME_HEADERS, BUCKETS, CODED], ids=["headers", "raw", "coded"])
def test_a_patch_that_lies_writes_nothing(
    group: dict[str, Lie], checkpoint: Path, tmp_path: Path
) -> None:
    patch, before = tmp_path / "patch", checkpoint.read_bytes()
    for name, lie in group.items():
        patch.write_bytes(one_way(lie.frames))
        with pytest.raises(DeltaSyncError) as raised:
            apply_patch_file(PatchFile(patch), Checkpoint(checkpoint), tmp_path / "out")
        assert is_expected(raised.value, lie) or not is_whole(lie), (name, raised.value)
        assert list(tmp_path.iterdir()) == [patch], name
    assert checkpoint.read_bytes() == before


def sealed(digest: str | None = None, version: int = NEXT) -> Sealed:
    return Sealed(version=version, digest=digest or digest_after("raw"))


def others() -> dict[str, tuple[list[Said], type[DeltaSyncError]]]:
    """Frames that are right each by itself, and no patch file together."""
    right: list[Said] = [layout(digest=digest_of(OLD)), begin(), TRUE["raw"], prepare(), sealed()]
    found: dict[str, tuple[list[Said], type[DeltaSyncError]]] = {}
    for n in range(5):
        found[f"w21 {n} frames"] = right[:n], TruncatedFrame
        found[f"w21 without frame {n}"] = right[:n] + right[n + 1 :], DeltaSyncError
        found[f"w21 frame {n} twice"] = right[: n + 1] + right[n:], SyncError
    for n in range(4):
        moved = [*right[:n], right[n + 1], right[n], *right[n + 2 :]]
        found[f"w21 frame {n} after the next"] = moved, SyncError
    for kind in MESSAGES:
        header = (FOLDER / f"{kind}.bin").read_bytes()
        for n in range(6):
            found[f"w21 {kind} at {n}"] = [*right[:n], Frame(header), *right[n:]], DeltaSyncError
    of_others: list[tuple[int, Said, type[DeltaSyncError]]] = [
        (0, layout(digest=digest_of(OLD), version=BASE - 1), VersionGap),
        (0, layout(digest=digest_of(OLD), stream_id="other"), WrongStream),
        (1, begin(stream_id="other"), WrongStream),
        (1, begin(layout_hash="0" * 64), ProtocolViolation),
        (1, begin(base_version=BASE + 1), VersionGap),
        (1, begin(base_version=None), ProtocolViolation),
        (1, begin(version=BASE), ProtocolViolation),
        (2, bucket(SPARSE, DENSE, version=9), ProtocolViolation),
        (2, bucket(SPARSE, DENSE, sequence=1), ProtocolViolation),
        (3, prepare(version=9), ProtocolViolation),
        (3, prepare(2), ProtocolViolation),
        (4, sealed(version=9), ProtocolViolation),
    ]
    for number, (n, other, error) in enumerate(of_others):
        found[f"w22 {number}"] = [*right[:n], other, *right[n + 1 :]], error
    found["w23 made from others"] = [layout(), *right[1:]], DigestMismatch
    found["w24 another result"] = [*right[:4], sealed("0" * 16)], DigestMismatch
    found["w21 a byte behind"] = [*right, Frame(b"\0")], WireError
    return found


def test_w21_w22_w23_w24_frames_that_are_no_patch_write_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    patch = tmp_path / "patch"
    for name, (frames, error) in others().items():
        patch.write_bytes(bytes_of(*frames))
        with pytest.raises(error) as raised:
            apply_patch_file(PatchFile(patch), Checkpoint(checkpoint), tmp_path / "out")
        if error not in (DeltaSyncError, SyncError, WireError):
            assert type(raised.value) is error, name
        assert list(tmp_path.iterdir()) == [patch], name


GIANT_SPAN = 2**31


@pytest.mark.parametrize(
    ("start", "span", "why"),
    [
        (2**32 - GIANT_SPAN + 1, GIANT_SPAN - 1, None),  # the widest sparse row that can be
        (0, GIANT_SPAN, r"2\^31"),
        (2**64 - 10, 50, "start"),
        (2**32 - 49, 50, "start"),
        (0, 2**32 + 1, "span"),
    ],
)
def test_w12_rows_of_a_giant_parameter(
    start: int, span: int, why: str | None, tmp_path: Path
) -> None:
    specs = (ParameterSpec(("a",), (2**32,), BY_NAME["float64"]),)
    blocks = struct.pack("<2i", 0, 1), bytes(16)
    payload = reference.payload([(0, 1, 1, 1, 0, start, span, 2, 8, 16)], [blocks])
    first = layout(parameters=entries(specs)), begin(layout_hash=layout_hash(specs))
    said = *first, bucket(data=payload), prepare(), sealed()
    (tmp_path / "patch").write_bytes(bytes_of(*said))
    with pytest.raises(InvalidTable, match=why) if why else nullcontext():
        for found in OneWayReader().read(FrameFile(tmp_path / "patch")):
            for _, run in found.runs():
                check_indices(run, name="a")


# The document and the tests


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    rules = re.findall(r"^- \*\*W(\d+)\*\*", DOCUMENT.read_text(), re.MULTILINE)
    text = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
    names = re.findall(r"^def test((?:_w\d\d)+)_", text, re.MULTILINE)
    tested = {int(number) for name in names for number in re.findall(r"\d\d", name)}
    tested |= {int(name[1:3]) for name in HEADERS | PAYLOADS}
    assert sorted(map(int, rules)) == sorted(tested) == list(range(1, len(rules) + 1))
