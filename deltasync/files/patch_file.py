"""Patch files turn one checkpoint into another, bit for bit: docs/wire-format.md, section 7."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deltasync.delta.bits import Flat
from deltasync.delta.changes import Changes
from deltasync.delta.coding import Coding
from deltasync.delta.detector import HostSnapshot, Part
from deltasync.delta.ledger import Ledger, digest_text
from deltasync.delta.readers import WireReader
from deltasync.delta.staging import Received
from deltasync.errors import ConfigError, DigestMismatch, LayoutMismatch, ProtocolViolation
from deltasync.files.checkpoint import Checkpoint, check_same_tensors
from deltasync.files.comparing import (
    Advance,
    Phase,
    check_digest,
    lines_of,
    measure_digests,
    no_phase,
)
from deltasync.files.frame_file import FrameFile, write_frames
from deltasync.files.one_way import OneWayReader, one_way_frames
from deltasync.files.output import appearing
from deltasync.transports.base import Frame
from deltasync.wire.messages import ParameterSpec

_BUCKET_BYTES = 16 << 20
_HELD_BYTES = 256 << 20  # changes that are kept; others are found a second time
_RELEASED_BYTES = 64 << 20  # read of each checkpoint before memory is released
_BASE, _VERSION = 0, 1


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
    base = measure_digests(old, advance=phase("reading", old.num_bytes))
    readers = [WireReader.of(new.tensor(one.name), one.dtype, name=one.name) for one in old.layout]
    held = _OldFile(old, new, base, advance=phase("comparing", old.num_bytes))
    plan = held.compare(
        readers,
        bucket_bytes=_BUCKET_BYTES,
        max_held_bytes=_HELD_BYTES,
        base_version=_BASE,
    )
    frames = one_way_frames(
        plan,
        old.layout,
        stream_id=digest_text(base.total),  # of the result nothing is known before it is packed
        version=_VERSION,
        digest=base.total,
        compression=codec,
    )
    num_bytes = write_frames(_reported(frames, phase("writing", old.num_bytes)), Path(path))
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
        self._file = FrameFile(path)
        reader, frames = OneWayReader(), iter(self._file)
        while reader.begin is None:
            frame = next(frames, None)
            if frame is None:
                reader.whole_digest()
            else:
                reader.take(frame)
        if reader.layout is None or reader.begin.base_version is None:
            raise ProtocolViolation("a patch file says what it fits on; this has no base_version")
        self.specs = {spec.name: spec for spec in reader.specs}
        self.layout = reader.specs
        self.base = int(reader.layout.digest, 16)

    def frames(self, advance: Advance) -> Iterator[Frame]:
        """The frames from the first one on. Raises WireError for one that is damaged."""
        return _reported(self._file, advance)


def apply_patch_file(
    patch: PatchFile, checkpoint: Checkpoint, out: str | Path, *, phase: Phase = no_phase
) -> int:
    """Write a new checkpoint: `checkpoint` with the patch applied. Returns its state digest.

    The new checkpoint gets its name when all of it was read again and has the digest that the patch
    promises. A folder keeps its sharding and its other files.

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
    total = checkpoint.num_bytes
    base = measure_digests(checkpoint, advance=phase("reading", total)).total
    if base != patch.base:
        raise DigestMismatch(
            f"{checkpoint.path} is not what the patch was made from: its state digest is "
            f"{digest_text(base)}, the patch needs {digest_text(patch.base)}"
        )
    with appearing(Path(out)) as made:
        copy_checkpoint(checkpoint.path, made)
        written = Checkpoint(made, writable=True)
        digest = apply_frames(written, patch.layout, patch.frames(phase("writing", total)))
        written.flush()
        check_digest(written, digest, "the patch is damaged, by what it makes", phase=phase)
    return digest


def apply_frames(
    checkpoint: Checkpoint, specs: Sequence[ParameterSpec], frames: Iterable[Frame]
) -> int:
    """Write one sync into a checkpoint, bucket by bucket. Returns the digest that it promises.

    After an error the checkpoint is half written.

    Args:
        checkpoint: It is `writable`, and holds what the sync applies to.
        specs: The layout of the sync.
        frames: The frames of the sync.

    Raises:
        WireError, SyncError: A frame is damaged, or the checkpoint lacks what changes.
    """
    flats = flats_of(checkpoint, specs)
    reader = OneWayReader(flats_of=lambda _: flats)
    for received in reader.read(frames):
        for number in received.parameters.tolist():
            if number not in flats:
                name = specs[number].name
                raise LayoutMismatch(f"{checkpoint.path} has no tensor {name!r}, which changes")
        _write(received, flats)
    return int(reader.whole_digest(), 16)


def _write(received: Received, flats: Mapping[int, Flat]) -> None:
    table, changes, parameter = received.table, received.changes, received.lane.space.parameter
    positions = torch.from_numpy(table.positions())
    for share, lanes in table.by_share():
        flats[int(parameter[share])].scatter(positions[lanes], changes.values[lanes])
    for run in table.runs():
        flats[int(parameter[run.share])].write(run.start, changes.whole[run.there])


def flats_of(checkpoint: Checkpoint, specs: Sequence[ParameterSpec]) -> dict[int, Flat]:
    """The tensors of a checkpoint by their number in a layout; those that it lacks are left out.

    Raises LayoutMismatch if one has another shape or dtype than in the layout.
    """
    flats = dict[int, Flat]()
    for number, spec in enumerate(specs):
        for name in spec.names:  # it may have any of them
            if (there := checkpoint.specs.get(name)) is None:
                continue
            if (there.shape, there.dtype) != (spec.shape, spec.dtype):
                raise LayoutMismatch(
                    f"{name}: the checkpoint has {there.dtype.name} {list(there.shape)}, the "
                    f"layout {spec.dtype.name} {list(spec.shape)}"
                )
            flats[number] = Flat.of(checkpoint.tensor(name))
            break
    return flats


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


def _reported(frames: Iterable[Frame], advance: Advance) -> Iterator[Frame]:
    for frame in frames:
        yield frame
        advance(len(frame.header) + (0 if frame.payload is None else len(frame.payload)))


class _OldFile(HostSnapshot):
    """The old checkpoint as it lies in its file: nothing is copied, and it never advances.

    While it is compared, it releases the memory of both checkpoints behind itself.
    """

    def __init__(self, old: Checkpoint, new: Checkpoint, base: Ledger, *, advance: Advance) -> None:
        super().__init__(base.space, lines_of(old, base.space))
        self.ledger, self._sums = base, self._there(base.sums)
        self._checkpoints, self._advance = (old, new), advance
        self._unreleased = self._compared = 0

    def part(self, low: int, high: int, *, only_counts: bool = False) -> list[Part]:
        found, space = super().part(low, high, only_counts=only_counts), self.space
        num_bytes = int((space.numel[low:high] * space.item_size[space.share[low:high]]).sum())
        if low >= self._compared:  # others are compared a second time
            self._compared = high
            self._advance(num_bytes)
        self._unreleased += num_bytes
        if self._unreleased > _RELEASED_BYTES:
            self._unreleased = 0
            for checkpoint in self._checkpoints:
                checkpoint.release()
        return found

    def advance(self, changes: Changes) -> None:
        """Do nothing: no second delta is taken against it."""
