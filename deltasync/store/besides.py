"""What a store gets besides deltas: anchors to begin at, and folded deltas to catch up with."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pydantic import Field

from deltasync.delta.options import OptionsModel
from deltasync.errors import StoreError
from deltasync.files.shards import ReadBits
from deltasync.store import keys
from deltasync.store.anchors import write_anchor
from deltasync.store.catalogue import Published
from deltasync.store.folding import FoldedDeltas
from deltasync.store.manifest import Way
from deltasync.store.spool import Spool
from deltasync.store.writer import RunWriter
from deltasync.sync.protocol.one_way import one_way_frames
from deltasync.sync.source.layout import SentLayout

logger = logging.getLogger(__name__)


class PublishOptions(OptionsModel):
    """What a store gets besides deltas."""

    anchor_every: int = Field(
        default=64, ge=1, description="versions from one anchor to the next, at most"
    )
    anchor_file_bytes: int = Field(
        default=5_000_000_000, ge=1, description="tensors in one file of an anchor"
    )
    fold_every: int = Field(
        default=8,
        ge=0,
        description="versions that a folded delta covers: readers that have missed them fetch it "
        "instead of each delta. 0 or 1 for none",
    )
    fold_max_bytes: int = Field(
        default=4 << 30,
        ge=0,
        description="host memory to fold with: larger deltas are not folded",
    )
    writer: str | None = Field(
        default=None, max_length=200, description="names the writer to people; None for its host"
    )


@dataclass(frozen=True, slots=True)
class Besides:
    """What was written besides a version.

    Attributes:
        anchor, fold: Ways to it; None if none was due.
        postponed: What could not be written, and why.
    """

    anchor: Way | None = None
    fold: Way | None = None
    postponed: str = ""


class BesidesWriter:
    """Writes anchors and folded deltas of the newest version when they are due.

    They come after the manifest, so that they delay nobody, and a failure here is no failure of the
    version.

    Args:
        writer: Of the run.
        options: When they are due.
    """

    def __init__(self, writer: RunWriter, options: PublishOptions) -> None:
        self._writer, self._options = writer, options
        self._versions = self._num_bytes = 0  # since the last anchor
        self._has_anchor = False
        self._recent: list[Spool] = []  # deltas since the last fold

    def restart(self) -> None:
        """The newest version has an anchor, and a new snapshot."""
        self._versions = self._num_bytes = 0
        self._has_anchor = True
        self.close()

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
            self._count(min(ways, key=lambda way: way.num_bytes))
            parent = at.manifest.parent
            found = None if parent is None else run.published(parent.version)
            if found is None:
                return
            at = found

    def add(self, way: Way, spool: Spool | None) -> None:
        """One more version, by this delta.

        Args:
            way: The delta.
            spool: Its frames, owned from now on; None if they are gone, which leaves them out of
                folds.
        """
        self._count(way)
        # A coded delta is decoded by the weights before it, which are gone.
        if spool is None or spool.is_coded or self._options.fold_every < 2:
            self.close()
            if spool is not None:
                spool.close()
        else:
            self._recent.append(spool)

    def write(self, layout: SentLayout, read: ReadBits) -> Besides:
        """Write what is due of the newest version, which `read` reads."""
        fold, failed = None, list[str]()
        anchor = None
        try:
            if len(self._recent) >= max(self._options.fold_every, 2):
                fold = self._fold(layout)
        except StoreError as error:
            failed.append(f"fold: {type(error).__name__}: {error}")
        try:
            if self._is_anchor_due(layout):
                anchor = self.write_anchor(self._writer.next_version - 1, layout, read)
                self._writer.add_way(anchor)
                self._versions = self._num_bytes = 0
                self._has_anchor = True
        except StoreError as error:
            anchor = None
            failed.append(f"anchor: {type(error).__name__}: {error}")
        postponed = "; ".join(failed)
        if postponed:
            logger.warning("v%d was published, but: %s", self._writer.next_version - 1, postponed)
        return Besides(anchor, fold, postponed)

    def write_anchor(self, version: int, layout: SentLayout, read: ReadBits) -> Way:
        """Write the objects of an anchor."""
        self._writer.put_layout(layout)
        return write_anchor(
            self._writer.run.objects,
            version,
            layout.specs,
            read,
            max_file_bytes=self._options.anchor_file_bytes,
        )

    def _is_anchor_due(self, layout: SentLayout) -> bool:
        if not self._has_anchor or self._versions >= self._options.anchor_every:
            return True
        return self._num_bytes > layout.num_bytes

    def _fold(self, layout: SentLayout) -> Way | None:
        """One delta in place of the recent ones; None if it would not be smaller, or not fit."""
        recent = self._recent
        try:
            if sum(spool.raw_bytes for spool in recent) > self._options.fold_max_bytes:
                return None
            folded = FoldedDeltas()
            for spool in recent:
                folded.take(spool.frames())
            return self._write_fold(folded, layout, sum(spool.num_bytes for spool in recent))
        finally:
            self.close()

    def _write_fold(self, folded: FoldedDeltas, layout: SentLayout, limit: int) -> Way | None:
        objects, version, codecs = self._writer.run.objects, folded.version, dict[str, int]()
        with Spool() as spool:
            spool.take(
                one_way_frames(
                    folded.plan(),
                    layout.specs,
                    stream_id=self._writer.run.name,
                    version=version,
                    digest=folded.base_digest,
                    compression="zstd",
                    counts=codecs,
                )
            )
            if spool.num_bytes >= limit:
                return None
            file = spool.write(objects, keys.frames_key(version, "fold"))
        way = Way(kind="fold", base=folded.base_version, files=(file,), codecs=codecs)
        self._writer.add_way(way)
        return way

    def _count(self, way: Way) -> None:
        self._versions += 1
        self._num_bytes += way.num_bytes

    def close(self) -> None:
        """Release what is kept for folds."""
        for spool in self._recent:
            spool.close()
        self._recent.clear()
