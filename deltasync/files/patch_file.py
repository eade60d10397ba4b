"""Patch files turn one checkpoint into another, bit for bit: docs/wire-format.md, section 7."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltasync.delta.bits import Flat
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.codecs.coding import Coding, policy_for
from deltasync.delta.digests import DigestLedger, digest_text
from deltasync.delta.host.backend import Change, HostBackend
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.policy import Policy
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.shard import whole
from deltasync.errors import ConfigError, DigestMismatch, ProtocolViolation
from deltasync.files.checkpoint import Checkpoint, check_same_tensors
from deltasync.files.comparing import Advance, measure_digests
from deltasync.files.frame_file import FrameFile, write_frames
from deltasync.files.output import appearing
from deltasync.sync.protocol.one_way import OneWayReader, one_way_frames
from deltasync.transports.base import Frame
from deltasync.wire.messages import ParameterSpec

_BUCKET_BYTES = 16 << 20
_HELD_BYTES = 256 << 20  # changes that are kept; others are found a second time
_RELEASED_BYTES = 64 << 20  # read of each checkpoint before memory is released
_BASE, _VERSION = 0, 1

Phase = Callable[[str], Advance]
"""Called with the name of a phase; returns what to call with its progress in bytes."""


def no_phase(_: str) -> Advance:
    """Report nothing."""
    return lambda num_bytes: None


@dataclass(frozen=True, slots=True)
class PatchSummary:
    """What was written.

    Attributes:
        num_bytes: Of the patch file.
        nnz: Elements that differ.
        base, digest: State digests of the checkpoint that it fits, and of the result.
    """

    num_bytes: int
    nnz: int
    base: int
    digest: int


def write_patch(
    old: Checkpoint,
    new: Checkpoint,
    path: str | Path,
    *,
    phase: Phase = no_phase,
    codec: Coding = "zstd",
) -> PatchSummary:
    """Write the patch file that makes `old` bit-identical to `new`.

    Args:
        old: What the patch applies to.
        new: What it makes, of the same names, shapes and dtypes.
        path: The new file; it appears when everything is written.
        phase: Called to report progress.
        codec: How payloads become short.

    Raises:
        LayoutMismatch: Names, shapes or dtypes differ.
        ConfigError: This build has no such codec, or `path` exists or cannot be written.
    """
    check_same_tensors(old.specs, new.specs)
    base = measure_digests(old, advance=phase("reading"))
    readers = [WireReader.of(new.tensor(one.name), one.dtype, name=one.name) for one in old.layout]
    plan = _OldFile(old, new, base, advance=phase("comparing")).compare(
        readers,
        policy=policy_for(Policy(), codec),
        bucket_bytes=_BUCKET_BYTES,
        max_held_bytes=_HELD_BYTES,
        base_version=_BASE,
    )
    frames = one_way_frames(
        plan,
        old.layout,
        stream_id=f"{digest_text(base.total)}-{digest_text(plan.ledger.total)}",
        version=_VERSION,
        digest=base.total,
        compression=codec,
    )
    num_bytes = write_frames(_told(frames, phase("writing")), Path(path))
    return PatchSummary(num_bytes, plan.nnz, base.total, plan.ledger.total)


class PatchFile:
    """A patch file, which can be read repeatedly.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read.
        WireError, SyncError: It does not begin as a patch file does.
    """

    def __init__(self, path: str | Path) -> None:
        self._frames = FrameFile(path)
        reader, frames = OneWayReader(), iter(self._frames)
        while reader.begin is None:
            frame = next(frames, None)
            if frame is None:
                reader.check_sealed()
            else:
                reader.take(frame)
        if reader.layout is None or reader.begin.base_version is None:
            raise ProtocolViolation("a patch file says what it fits on; this has no base_version")
        self.specs = {spec.name: spec for spec in reader.specs}
        self.layout = reader.specs
        self.base = int(reader.layout.digest, 16)

    def _replay(
        self,
        stage: Callable[[ReadBucket], None],
        flats: Mapping[int, Flat],
        *,
        advance: Advance = lambda num_bytes: None,
    ) -> int:
        """Pass each bucket to `stage`. Returns the digest that the patch promises.

        `flats` are the weights that it changes, by their number in the patch's layout.

        Raises:
            WireError, SyncError: The file is damaged, or `stage` raised.
        """
        reader = OneWayReader(flats=flats)
        for bucket in reader.read(_told(self._frames, advance)):
            stage(bucket)
        assert reader.sealed is not None
        return int(reader.sealed.digest, 16)

    @property
    def num_bytes(self) -> int:
        return self._frames.num_bytes


def apply_patch_file(
    patch: PatchFile, checkpoint: Checkpoint, out: str | Path, *, phase: Phase = no_phase
) -> int:
    """Write a new checkpoint: `checkpoint` with the patch applied. Returns its state digest.

    Before anything is written, the whole patch is checked against the checkpoint, and the result
    against the digest in the patch. What was written is read again before it gets its name. A
    folder keeps its sharding and its other files.

    Args:
        patch: The patch.
        checkpoint: The checkpoint that it fits; only read.
        out: The new file or folder.
        phase: Called to report progress.

    Raises:
        LayoutMismatch: Names, shapes or dtypes are not the patch's.
        DigestMismatch: The checkpoint is not the patch's base, or the result would be wrong.
        WireError: The patch is damaged.
        ConfigError: `out` exists or cannot be written.
    """
    check_same_tensors(checkpoint.specs, patch.specs, called=("the checkpoint", "the patch"))
    ledger = measure_digests(checkpoint, advance=phase("reading"))
    if ledger.total != patch.base:
        raise DigestMismatch(
            f"{checkpoint.path} is not what the patch was made from: its state digest is "
            f"{digest_text(ledger.total)}, the patch needs {digest_text(patch.base)}"
        )
    # The patch may number the parameters in another order.
    ledger = _reordered(ledger, patch.layout)
    _predict(patch, checkpoint, ledger, phase("checking"))
    with appearing(Path(out)) as made:
        copy_checkpoint(checkpoint.path, made)
        written = Checkpoint(made, writable=True)
        flats = _flats(written, patch.layout)
        lines = Lines(flats, len(patch.layout))
        staging = Staging(lines, ledger, in_place=True)
        promised = patch._replay(staging.stage_bucket, flats, advance=phase("writing"))
        written.flush()
        found = measure_digests(written, advance=phase("verifying")).total
        if found != promised:
            raise DigestMismatch("what was written is not what the patch promises; try again")
    return found


def _predict(
    patch: PatchFile, checkpoint: Checkpoint, ledger: DigestLedger, advance: Advance
) -> None:
    """Raise DigestMismatch unless the patch makes of the checkpoint what it promises."""
    flats = _flats(checkpoint, patch.layout)
    lines = Lines(flats, len(patch.layout))
    now = ledger

    def stage(bucket: ReadBucket) -> None:
        nonlocal now
        staging = Staging(lines, now)  # one for each bucket, since it keeps what it stages
        staging.stage_bucket(bucket)
        now = staging.ledger
        checkpoint.release()

    if patch._replay(stage, flats, advance=advance) != now.total:
        raise DigestMismatch("the patch is damaged: it would not make what it promises")


def copy_checkpoint(path: Path, made: Path) -> None:
    """Copy a file, or a folder with all that is in it. The copy can be written."""
    if path.resolve() in made.resolve().parents:
        raise ConfigError(f"{path}: the new checkpoint cannot lie inside the old one")
    if path.is_dir():
        try:
            shutil.copytree(path, made, copy_function=_copy_file)
        except shutil.Error as error:  # a list of what could not be copied, where to, and why
            raise OSError(error.args[0][0][2]) from error
        for folder, _, _ in os.walk(made):  # a read-only one can be neither renamed nor removed
            os.chmod(folder, os.stat(folder).st_mode | stat.S_IRWXU)
    else:
        _copy_file(path, made)


def _copy_file(path: str | Path, made: str | Path) -> None:
    shutil.copy(path, made)
    os.chmod(made, os.stat(made).st_mode | stat.S_IWUSR)


def _flats(checkpoint: Checkpoint, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
    return {n: Flat.of(checkpoint.tensor(spec.name)) for n, spec in enumerate(layout)}


def _reordered(ledger: DigestLedger, layout: Sequence[ParameterSpec]) -> DigestLedger:
    numbers = {spec.name: number for number, spec in enumerate(ledger.specs)}
    other = DigestLedger(whole(layout), chunk_numel=ledger.chunk_numel)
    for number, spec in enumerate(layout):
        old = numbers[spec.name]
        chunks = ledger.sums[ledger.first[old] : ledger.first[old + 1]]
        other.sums[other.first[number] : other.first[number + 1]] = chunks
    return other


def _told(frames: Iterator[Frame] | FrameFile, advance: Advance) -> Iterator[Frame]:
    for frame in frames:
        yield frame
        advance(len(frame.header) + (0 if frame.payload is None else len(frame.payload)))


class _OldFile(HostBackend):
    """The old checkpoint as it lies in its file: nothing is copied, and it never advances.

    While it is compared, it releases the memory of both checkpoints behind itself.
    """

    def __init__(
        self, old: Checkpoint, new: Checkpoint, ledger: DigestLedger, *, advance: Advance
    ) -> None:
        super().__init__(_flats(old, old.layout), ledger)
        self._checkpoints, self._advance, self._unreleased = (old, new), advance, 0

    def change(
        self, parameter: int, reader: Reader, policy: Policy, *, ledger: DigestLedger, room: int
    ) -> Change | None:
        found = super().change(parameter, reader, policy, ledger=ledger, room=room)
        num_bytes = reader.numel * reader.dtype.item_size
        self._advance(num_bytes)
        self._unreleased += num_bytes
        if self._unreleased > _RELEASED_BYTES:
            self._unreleased = 0
            for checkpoint in self._checkpoints:
                checkpoint.release()
        return found

    def write_ahead(self, parameter: int, run: object, bits: object) -> None:
        """Do nothing: no second delta is taken against it."""
