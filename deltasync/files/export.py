"""What a receiver proved to hold, as a checkpoint in safetensors: it restores a lost trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltasync.delta.bits import Live
from deltasync.errors import ConfigError, LayoutMismatch
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import Advance, Phase, check_digest, no_phase
from deltasync.files.output import appearing, flush_to_disk, refuse_existing
from deltasync.files.shards import shards_of
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.target.base import some_of
from deltasync.wire.messages import ParameterSpec

_SHARD_BYTES = 1 << 30  # of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A checkpoint that was written.

    Attributes:
        stream_id, version: Of which training run, and which version of it.
        digest: The state digest of the weights, and of the files.
        num_bytes: Bytes of all tensors.
        num_tensors: Number of tensors, each tied group once.
        files: The files that hold them.
    """

    stream_id: str
    version: int
    digest: int
    num_bytes: int
    num_tensors: int
    files: tuple[Path, ...]


def export_weights(
    receiver: WeightReceiver,
    path: str | Path,
    *,
    shard_bytes: int = _SHARD_BYTES,
    phase: Phase = no_phase,
) -> Exported:
    """Write the version that a receiver holds as a safetensors checkpoint.

    The tensors have the names, shapes and dtypes in which the trainer sends them, and its bits, in
    whatever form the engine holds them. What lies in the files is compared with the digests that
    the receiver has proved. A tied tensor is written once, under its first name; the metadata of
    its file has the others, as `safetensors.torch.load_model` reads them.

    Syncs wait while the weights are read, not while the files are checked. It takes no host memory
    but for a piece of a tensor.

    Args:
        receiver: Of an engine of one rank that holds all that is sent. It may be in use by another
            thread, and its trainer may be gone.
        path: The new folder. It appears when everything is written, or not at all.
        shard_bytes: Size of a file; a larger tensor has a file of its own.
        phase: Called to report progress.

    Raises:
        DirtyReceiver: The weights may mix two versions.
        CallOrderError: No version is held, or the weights are detached or between two versions.
        LayoutMismatch: The rank holds a part of a parameter, or not all parameters.
        DigestMismatch: The weights are not those of the version: something else wrote them.
        ConfigError: The folder exists or cannot be written, or a disk is full.
    """
    out = Path(path)
    refuse_existing(out)
    with appearing(out) as made:
        made.mkdir()
        with receiver.hold() as held:
            live = held.live
            specs, flats = [share.spec for share in live.space.given], live.flats
            check_whole(specs, flats)
            digest = live.ledger.total
            num_bytes = sum(spec.numel * spec.dtype.item_size for spec in specs)
            advance = phase("writing", num_bytes)
            files = _write(specs, flats, made, shard_bytes=shard_bytes, advance=advance)
            stream_id, version = held.stream_id, held.version
        fault = "something else wrote the weights (call the receiver's invalidate), or the disk"
        check_digest(Checkpoint(made), digest, fault, phase=phase)
    return Exported(
        stream_id=stream_id,
        version=version,
        digest=digest,
        num_bytes=num_bytes,
        num_tensors=len(specs),
        files=tuple(out / name for name in files),
    )


def check_whole(specs: Sequence[ParameterSpec], flats: Mapping[int, Live]) -> None:
    """Raise LayoutMismatch, by name, unless all elements of these parameters are held."""
    if missing := [spec.name for number, spec in enumerate(specs) if number not in flats]:
        raise LayoutMismatch(f"this rank does not hold {some_of(missing)}: {_ELSEWHERE}")
    for number, spec in enumerate(specs):
        if flats[number].held(0, 0) is not None:
            count = f"{flats[number].numel} of {spec.numel} elements of {spec.name!r}"
            raise LayoutMismatch(f"this rank holds {count}: {_ELSEWHERE}")


def _write(
    specs: Sequence[ParameterSpec],
    flats: Mapping[int, Live],
    folder: Path,
    *,
    shard_bytes: int,
    advance: Advance,
) -> list[str]:
    """Write the files of a checkpoint. Returns the names of those that hold tensors."""
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes}: give at least 1")
    shards = shards_of(specs, max_bytes=shard_bytes)
    for shard in shards:
        pieces = shard.pieces(specs, lambda number, start, stop: flats[number].read(start, stop))
        _write_file(folder / shard.name, pieces, advance)
    flush_to_disk(folder)
    return [shard.name for shard in shards if shard.numbers]


def _write_file(path: Path, pieces: Iterable[memoryview], advance: Advance) -> None:
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            advance(len(piece))
    flush_to_disk(path)


_ELSEWHERE = "export from an engine of one rank"
