"""Anchors: a whole version as plain safetensors, uploaded as it is read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field
from torch import Tensor

from deltasync.delta.bits import Live
from deltasync.delta.digests import DigestLedger
from deltasync.delta.options import OptionsModel
from deltasync.delta.patch import CHUNK_NUMEL
from deltasync.delta.shard import whole
from deltasync.errors import DigestMismatch, StoreError
from deltasync.files.shards import ReadBits, Shard, index_of, shards_of
from deltasync.store import keys
from deltasync.store.catalogue import Published
from deltasync.store.manifest import StoredFile, Way, sha256_of
from deltasync.store.objects import Objects
from deltasync.store.writer import RunWriter
from deltasync.sync.source.layout import SentLayout
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec

logger = logging.getLogger(__name__)


class PublishOptions(OptionsModel):
    """What a store gets besides deltas."""

    anchor_every: int = Field(
        default=64, ge=1, description="versions from one anchor to the next, at most"
    )
    anchor_file_bytes: int = Field(
        default=5_000_000_000, ge=1, description="tensors in one file of an anchor"
    )
    writer: str | None = Field(
        default=None, max_length=200, description="names the writer to people; None for its host"
    )


class AnchorWriter:
    """Writes an anchor of the newest version when one is due.

    It comes after the manifest, so that it delays nobody, and a failure here is no failure of the
    version.

    Args:
        writer: Of the run.
        options: When an anchor is due.

    Attributes:
        is_damaged: Whether the weights that an anchor was written of are not the version: the next
            version has to be all weights of the source.
    """

    def __init__(self, writer: RunWriter, options: PublishOptions) -> None:
        self._writer, self._options = writer, options
        self._versions = self._num_bytes = 0  # since the last anchor
        self._has_anchor = self.is_damaged = False

    def restart(self) -> None:
        """The newest version has an anchor."""
        self._versions = self._num_bytes = 0
        self._has_anchor, self.is_damaged = True, False

    def resume(self, head: Published) -> None:
        """The chain goes on from here; look for its last anchor."""
        self._versions = self._num_bytes = 0
        self._has_anchor = False
        at, run = head, self._writer.run
        while self._versions < self._options.anchor_every:
            ways = run.ways(at)
            if any(way.kind == "anchor" for way in ways):
                self._has_anchor = True
                return
            self.add(ways[0])
            parent = at.manifest.parent
            found = None if parent is None else run.published(parent.version)
            if found is None:
                return
            at = found

    def add(self, delta: Way) -> None:
        """One more version, by this delta."""
        self._versions += 1
        self._num_bytes += delta.num_bytes

    def write_due(self, layout: SentLayout, flats: Mapping[int, Live]) -> tuple[Way | None, str]:
        """Write an anchor of the newest version if one is due.

        Args:
            layout: Its parameters.
            flats: Its weights, by parameter.

        Returns:
            (the anchor, or None; why one that is due could not be written, or "").
        """
        head = self._writer.head
        assert head is not None
        is_new = self._has_anchor and self._versions < self._options.anchor_every
        if is_new and self._num_bytes <= layout.num_bytes:
            return None, ""
        try:
            digest = int(head.manifest.digest, 16)
            anchor = self.write(head.version, layout, flats, digest=digest)
            self._writer.add_anchor(anchor)
        except (StoreError, DigestMismatch) as error:
            self.is_damaged = isinstance(error, DigestMismatch)
            postponed = f"anchor: {type(error).__name__}: {error}"
            logger.warning("v%d was published, but: %s", head.version, postponed)
            return None, postponed
        self.restart()
        return anchor, ""

    def write(
        self, version: int, layout: SentLayout, flats: Mapping[int, Live], *, digest: int
    ) -> Way:
        """Write the objects of an anchor. Arguments and errors as of `write_anchor`."""
        self._writer.put_layout(layout)
        return write_anchor(
            self._writer.run.objects,
            version,
            layout.specs,
            lambda parameter, start, stop: flats[parameter].read(start, stop),
            max_file_bytes=self._options.anchor_file_bytes,
            digest=digest,
        )


def write_anchor(
    objects: Objects,
    version: int,
    specs: Sequence[ParameterSpec],
    read: ReadBits,
    *,
    max_file_bytes: int,
    digest: int,
) -> Way:
    """Write all weights of a version.

    Args:
        objects: Of the run.
        version: Which version the weights are.
        specs: The layout.
        read: Reads the weights, which must not change meanwhile.
        max_file_bytes: Tensors of one file, in bytes.
        digest: State digest of the version.

    Raises:
        StoreError: It was not written as a whole. What was written of it is no part of a version.
        DigestMismatch: What was written has another digest; likewise.
    """
    folder = keys.anchor_folder(version)
    shards = shards_of(specs, max_bytes=max_file_bytes)
    ledger, digests = DigestLedger(whole(specs), chunk_numel=CHUNK_NUMEL), [0] * len(specs)

    def digested(parameter: int, start: int, stop: int) -> Tensor:
        bits = read(parameter, start, stop).cpu()
        before = digests[parameter] if start else 0  # it may be written a second time
        digests[parameter] = before + ledger.digest_run(parameter, bits, start)
        return bits

    files = [_write(objects, f"{folder}/{shard.name}", shard, specs, digested) for shard in shards]
    if (index := index_of(shards, specs)) is not None:
        name, data = index
        objects.put(f"{folder}/{name}", data)
        files.append(StoredFile(key=f"{folder}/{name}", bytes=len(data), sha256=sha256_of(data)))
    payload_bytes = sum(shard.num_bytes for shard in shards)
    if sum(digests) & MASK != digest:
        raise DigestMismatch(f"not v{version}: memory was altered; the next version is all weights")
    return Way(kind="anchor", files=tuple(files), codecs={"safetensors": payload_bytes})


def _write(
    objects: Objects, key: str, shard: Shard, specs: Sequence[ParameterSpec], read: ReadBits
) -> StoredFile:
    sha256 = hashlib.sha256()

    def pieces() -> Iterator[memoryview]:
        nonlocal sha256
        sha256 = hashlib.sha256()  # it may be written a second time
        for piece in shard.pieces(specs, read):
            sha256.update(piece)
            yield piece

    objects.write(key, pieces)
    return StoredFile(key=key, bytes=shard.num_bytes, sha256=sha256.hexdigest())
