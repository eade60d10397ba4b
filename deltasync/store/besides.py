"""What a store gets besides deltas: anchors to begin at, and folded deltas to catch up with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from deltasync.delta.backend import Plan
from deltasync.delta.bits import Live
from deltasync.delta.codecs.coding import Coding
from deltasync.delta.options import OptionsModel
from deltasync.errors import DigestMismatch, StoreError
from deltasync.store import keys
from deltasync.store.anchors import write_anchor
from deltasync.store.catalogue import Published
from deltasync.store.manifest import Way
from deltasync.store.spool import Spool
from deltasync.store.undo import UndoLog
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
        description="host memory for the old bits that folds are coded by; where more has changed, "
        "nothing is folded",
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

    Attributes:
        is_damaged: Whether the weights that an anchor was written of are not the version: the next
            version has to be all weights of the source.
    """

    def __init__(self, writer: RunWriter, options: PublishOptions) -> None:
        self._writer, self._options = writer, options
        self._versions = self._num_bytes = 0  # since the last anchor
        self._has_anchor = self.is_damaged = False
        self._undo = UndoLog(options.fold_max_bytes)  # since the last fold
        self._unfolded_bytes = 0  # of the deltas since then

    def restart(self) -> None:
        """The newest version has an anchor, and a new snapshot."""
        self._versions = self._num_bytes = 0
        self._has_anchor, self.is_damaged = True, False
        self._begin_fold()

    def resume(self, head: Published) -> None:
        """The chain goes on from here; look for its last anchor.

        What was to be folded with the versions before is lost with the process that kept it.
        """
        self._versions = self._num_bytes = 0
        self._has_anchor = False
        self._begin_fold()
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

    def watched(self, delta: Plan, layout: SentLayout) -> Plan:
        """The delta, of which folds keep what it changes; to be packed instead of it."""
        return self._undo.watched(delta, layout.specs)

    def add(self, way: Way) -> None:
        """One more version, by this delta, which was `watched`."""
        self._count(way)
        self._unfolded_bytes += way.num_bytes

    def write(self, layout: SentLayout, flats: Mapping[int, Live], coding: Coding) -> Besides:
        """Write what is due of the newest version.

        Args:
            layout: Its parameters.
            flats: Its weights, by parameter.
            coding: What a fold is coded with; "none" is compressed.
        """
        fold = anchor = None
        failed = list[str]()
        try:
            if self._is_fold_due():
                fold = self._fold(flats, coding)
        except StoreError as error:
            failed.append(f"fold: {type(error).__name__}: {error}")
        try:
            if self._is_anchor_due(layout):
                assert self._writer.head is not None
                version, digest = self._writer.head.version, self._writer.head.manifest.digest
                anchor = self.write_anchor(version, layout, flats, digest=int(digest, 16))
                self._writer.add_way(anchor)
                self._versions = self._num_bytes = 0
                self._has_anchor = True
        except (StoreError, DigestMismatch) as error:
            anchor, self.is_damaged = None, isinstance(error, DigestMismatch)
            failed.append(f"anchor: {type(error).__name__}: {error}")
        postponed = "; ".join(failed)
        if postponed:
            logger.warning("v%d was published, but: %s", self._writer.next_version - 1, postponed)
        return Besides(anchor, fold, postponed)

    def write_anchor(
        self, version: int, layout: SentLayout, flats: Mapping[int, Live], *, digest: int
    ) -> Way:
        """Write the objects of an anchor. Arguments as of `write_anchor`."""
        self._writer.put_layout(layout)
        return write_anchor(
            self._writer.run.objects,
            version,
            layout.specs,
            lambda parameter, start, stop: flats[parameter].read(start, stop),
            max_file_bytes=self._options.anchor_file_bytes,
            digest=digest,
        )

    def _is_anchor_due(self, layout: SentLayout) -> bool:
        if not self._has_anchor or self._versions >= self._options.anchor_every:
            return True
        return self._num_bytes > layout.num_bytes

    def _is_fold_due(self) -> bool:
        """Whether enough versions can be folded; if what they changed is not known, begin anew."""
        head, base = self._writer.head, self._undo.base
        assert head is not None
        if base is None:
            self._begin_fold()
            return False
        return head.version - base.version >= self._options.fold_every

    def _begin_fold(self) -> None:
        """Fold what follows the newest version."""
        self._unfolded_bytes = 0
        self._undo.begin(self._writer.head if self._options.fold_every > 1 else None)

    def _fold(self, flats: Mapping[int, Live], coding: Coding) -> Way | None:
        """One delta in place of the recent ones; None if it would not be smaller.

        If that fails, it is due again with the next version, and leads there.
        """
        objects, head, base = self._writer.run.objects, self._writer.head, self._undo.base
        assert head is not None
        assert base is not None
        codecs = dict[str, int]()
        plan = self._undo.fold(flats, int(head.manifest.digest, 16))
        with Spool() as spool:
            spool.take(
                one_way_frames(
                    plan,
                    self._undo.specs,
                    stream_id=self._writer.run.name,
                    version=head.version,
                    digest=int(base.manifest.digest, 16),
                    compression="zstd" if coding == "none" else coding,
                    counts=codecs,
                )
            )
            if spool.num_bytes >= self._unfolded_bytes:
                self._begin_fold()
                return None
            file = spool.write(objects, keys.frames_key(head.version, "fold"))
        way = Way(kind="fold", base=base.version, files=(file,), codecs=codecs)
        self._writer.add_way(way)
        self._begin_fold()
        return way

    def _count(self, way: Way) -> None:
        self._versions += 1
        self._num_bytes += way.num_bytes

    def close(self) -> None:
        """Release what is kept for folds."""
        self._undo.begin(None)
