"""The trainer's end of a store: compares, writes a delta, and publishes its manifest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Literal, cast

from deltasync.delta.coding import Coding
from deltasync.delta.ledger import Ledger, digest_text
from deltasync.delta.modes import plain_mode
from deltasync.delta.snapshot import Plan
from deltasync.errors import DigestMismatch, ObjectDamaged, StoreError, StoreRefused
from deltasync.files.frame_file import put_frames
from deltasync.files.one_way import one_way_frames
from deltasync.store import keys
from deltasync.store.anchors import PublishOptions, write_anchor
from deltasync.store.catalogue import Published
from deltasync.store.manifest import Manifest, StoredFile, Way
from deltasync.store.objects import Objects, StoreOptions
from deltasync.store.writer import Changed, RunWriter
from deltasync.sync.arguments import check_options, local_weights
from deltasync.sync.events import Phase, SyncEvent, SyncFailed, report, reporting
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import OneCaller
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights, OwnWeights
from deltasync.sync.stats import DeltaWatch
from deltasync.transports.base import Frame

logger = logging.getLogger(__name__)
_IN_MEMORY_BYTES = 16 << 20  # of a delta; the rest is in a temporary file


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats(SyncEvent):
    """One call of `publish`.

    Attributes:
        version: The version that the store has now.
        base_version: The version that the delta fits on; None if there is no delta.
        kind: "delta"; "anchor" for all weights; "unchanged" if the store has these weights already,
            as when a trainer starts again where it stopped.
        digest: State digest of the version.
        numel: Elements of the model.
        nnz: Elements that differ from the version before.
        delta_bytes, anchor_bytes: Of the objects written.
        dense_bytes: Bytes of all values.
        compression: What deltas are coded with.
        diff_s: To compare.
        upload_s: To pack and to write.
        total_s: The whole call.
        run: The run's id.
        ended_at: When the call ended, in seconds since the Unix epoch.
        phases: Parts of the call: "compare", "upload".
        warnings: As of `SyncStats`.
        postponed: Why an anchor that was due could not be written. The next call tries it again;
            the version itself is complete.
    """

    version: int
    base_version: int | None
    kind: Literal["delta", "anchor", "unchanged"]
    digest: int
    numel: int
    nnz: int
    delta_bytes: int
    anchor_bytes: int
    dense_bytes: int
    diff_s: float
    upload_s: float
    total_s: float
    compression: Coding = "none"
    postponed: str = ""
    run: str = ""
    ended_at: float = 0.0
    phases: tuple[Phase, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def density(self) -> float:
        """Share of the elements that changed, 0 to 1."""
        return self.nnz / self.numel if self.numel else 0.0

    def __str__(self) -> str:
        """One line, as it is logged."""
        return (
            f"v{self.version}: {self.kind}, {self.density:.2%} of {self.numel:,} elements, "
            f"{self.delta_bytes + self.anchor_bytes:,} bytes, "
            f"{self.total_s * 1e3:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A version whose manifest may be in the store."""

    manifest: Manifest
    delta: Plan | None


class StoreSender:
    """Publishes the trainer's weights to a store, one version a call.

    The first call compares the newest version of the run with the weights: if they are the same,
    the chain goes on, otherwise all weights are published as an anchor. Later calls publish deltas.
    A version exists when its manifest does; if a call fails before that, readers keep what they
    have, and the next call covers it. Use it from one thread. The source must not change during
    `publish`.

    Args:
        source: The trainer's parameters; read, never written. Or `StreamedWeights`, which have
            their own options.
        url: Where the store of this run is, see `Objects`: a trainer that is started again goes on
            with what is there.
        options: As of a `WeightSender`; `compression` is "gap" by default. With a
            `stream_id` the store of a run of another name is refused.
        store: How the store is reached.
        publishing: When anchors are written.

    Raises:
        ConfigError: An argument is wrong.
        StoreError: The store cannot be reached.
    """

    def __init__(
        self,
        source: WeightSource | LocalWeights,
        url: str | Path,
        *,
        options: SenderOptions | None = None,
        store: StoreOptions | None = None,
        publishing: PublishOptions | None = None,
    ) -> None:
        check_options(options, SenderOptions)
        check_options(store, StoreOptions)
        check_options(publishing, PublishOptions)
        self.publishing = publishing or PublishOptions()
        self._weights = _weights_of(source, options)
        objects = Objects(url, store, make=True)
        self._writer = RunWriter(objects, self._weights.options.stream_id)
        self._pending: _Pending | None = None
        self._is_started = self._holds_head = self._is_hinted = False
        self._anchor_is_due = self._is_damaged = False
        self._delta_bytes = 0  # since the last anchor
        refusal = "a version is being published; a StoreSender is for one thread"
        self._caller = OneCaller(refusal)
        self._watch = DeltaWatch()

    @property
    def run(self) -> str:
        """The run's id, `stream_id`; without one it is empty before the first version."""
        return self._writer.run_id or ""

    @property
    def version(self) -> int:
        """The newest version that is known; 0 before the first."""
        return self._writer.next_version - 1

    def publish(self, *, on_source_read: Callable[[], None] | None = None) -> PublishStats:
        """Publish the source's current weights as one version.

        Args:
            on_source_read: Called when the source has been read for the last time. Another thread
                may change it from then on, while this call uploads.

        Raises:
            StoreUnavailable, StoreRefused: The version was not published, or its manifest got no
                answer; the next call finds out, and covers it.
            ObjectDamaged: What was uploaded was deleted before the manifest named it. The version
                was not published; the next call covers it.
            WriterConflict: Another writer publishes to this run. This object is of no more use.
            ConfigError: The store has a run of another `stream_id`.
            SourceChanged: The source is no longer the same model: make a new StoreSender. Or it
                changed during the call: the version was not published, the next call covers it.
        """
        began = time.perf_counter()
        with (
            plain_mode(),
            self._caller.call(),
            reporting(lambda error: self._failed(error, began)),
            self._weights.one_call(on_source_read),
        ):
            self._writer.check_alone()
            self._settle()
            stats = self._publish_next(began)
        logger.info("published %s", stats)
        report(stats)
        return stats

    def _failed(self, error: BaseException, began: float) -> SyncFailed:
        return SyncFailed(
            role="publisher",
            error=error,
            stream_id=self.run,
            version=self._writer.next_version,
            total_s=time.perf_counter() - began,
            ended_at=time.time(),
        )

    def _publish_next(self, began: float) -> PublishStats:
        if not self._holds_head or self._is_damaged:
            return self._begin(began)
        head = self._writer.head
        assert head is not None
        self._writer.check_there()
        delta = self._weights.delta(head.version)
        compared = time.perf_counter()
        way = self._write_delta(delta)
        after = cast("Ledger", delta.ledger)
        numbers = after.changed_since(self._weights.snapshot.ledger)
        changed = _digests_of(after, sorted(numbers))
        published = self._commit(way, delta=delta, nnz=delta.nnz, changed=changed)
        anchor, postponed = self._write_due_anchor(published)
        return self._stats(
            *(published, "delta", began, compared),
            delta=delta,
            delta_bytes=way.num_bytes,
            anchor_bytes=0 if anchor is None else anchor.num_bytes,
            postponed=postponed,
        )

    def _write_delta(self, delta: Plan) -> Way:
        version = self._writer.next_version
        frames = one_way_frames(
            delta,
            self._weights.layout.specs,
            stream_id=self.run,
            version=version,
            digest=self._weights.digests.total,
            compression=self._weights.options.compression,
        )
        objects, key = self._writer.run.objects, keys.frames_key(version)
        with _spooled(frames) as spool:
            self._weights.release()
            self._writer.put_layout(self._weights.layout)

            def pieces() -> Iterator[bytes]:  # once more, if the store fails
                spool.seek(0)
                yield from iter(partial(spool.read, objects.options.part_bytes), b"")

            num_bytes, sha256 = objects.write(key, pieces)
        file = StoredFile(key=key, bytes=num_bytes, sha256=sha256)
        return Way(kind="delta", files=(file,))

    def _begin(self, began: float) -> PublishStats:
        """The first version from here: what the store has, or an anchor."""
        head = self._writer.start() if not self._is_started else self._writer.head
        self._is_started = True
        self._weights.capture(())
        compared = time.perf_counter()
        self._weights.release()
        if head is not None and not self._is_damaged and self._is_same(head):
            self._holds_head = True
            return self._stats(head, "unchanged", began, compared)
        snapshot = self._weights.snapshot
        if self._is_damaged:
            snapshot.measure_again()
        way = self._write_anchor(self._writer.next_version, snapshot.ledger.total)
        changed = _digests_of(snapshot.ledger, range(len(self._weights.layout.specs)))
        published = self._commit(way, delta=None, nnz=self._weights.layout.numel, changed=changed)
        return self._stats(published, "anchor", began, compared, anchor_bytes=way.num_bytes)

    def _commit(self, way: Way, *, delta: Plan | None, nnz: int, changed: Changed) -> Published:
        digest = self._weights.digests.total if delta is None else delta.ledger.total
        layout = self._weights.layout
        manifest = self._writer.manifest(layout, way, digest=digest, nnz=nnz, changed=changed)
        self._pending = _Pending(manifest, delta)
        return self._finish(self._pending)

    def _finish(self, pending: _Pending) -> Published:
        """Put the manifest. If it can never exist, its changes are those of the next version.

        Whatever an interrupt leaves undone, the same call does with the same outcome.
        """
        try:
            published = self._writer.commit(pending.manifest)
        except ObjectDamaged:
            self._pending = None
            raise
        if pending.delta is None:
            self._anchor_is_due, self._is_damaged, self._delta_bytes = False, False, 0
        else:
            pending.delta.decided()
            self._delta_bytes += pending.manifest.way.num_bytes
            is_its_turn = (published.version - 1) % self.publishing.anchor_every == 0
            self._anchor_is_due |= is_its_turn or self._delta_bytes > self._weights.layout.num_bytes
        self._pending, self._holds_head = None, True
        return published

    def _settle(self) -> None:
        """Find out what became of a manifest that got no answer: it is put again."""
        if self._pending is None:
            return
        is_streamed = not isinstance(self._weights, OwnWeights)
        if is_streamed:  # what came meanwhile was compared with the version before
            self._pending = replace(self._pending, delta=None)
        with suppress(ObjectDamaged):  # then the version was never published
            self._finish(self._pending)
        self._holds_head &= not is_streamed

    def _is_same(self, head: Published) -> bool:
        """Whether the version of the store is what was captured."""
        is_layout = head.manifest.layout_hash == self._weights.layout.hash
        return is_layout and int(head.manifest.digest, 16) == self._weights.digests.total

    def _write_due_anchor(self, head: Published) -> tuple[Way | None, str]:
        """(an anchor of the version just published, or None; why one that is due failed, or "").

        It comes after the manifest, so that it delays nobody, and if it fails, the version stands.
        """
        if not self._anchor_is_due:
            return None, ""
        try:
            anchor = self._write_anchor(head.version, int(head.manifest.digest, 16))
            self._writer.add_anchor(anchor)
        except (StoreError, DigestMismatch) as error:
            self._is_damaged = isinstance(error, DigestMismatch)
            postponed = f"anchor: {type(error).__name__}: {error}"
            logger.warning("v%d was published, but: %s", head.version, postponed)
            return None, postponed
        self._anchor_is_due, self._delta_bytes = False, 0
        return anchor, ""

    def _write_anchor(self, version: int, digest: int) -> Way:
        """Write the objects of an anchor. Raises as `write_anchor`."""
        self._writer.put_layout(self._weights.layout)
        return write_anchor(
            self._writer.run.objects,
            version,
            self._weights.layout.specs,
            self._weights.snapshot.read,
            max_file_bytes=self.publishing.anchor_file_bytes,
            digest=digest,
        )

    def _stats(
        self,
        published: Published,
        kind: Literal["delta", "anchor", "unchanged"],
        began: float,
        compared: float,
        *,
        delta: Plan | None = None,
        delta_bytes: int = 0,
        anchor_bytes: int = 0,
        postponed: str = "",
    ) -> PublishStats:
        version, manifest = published.version, published.manifest
        warnings = self._watch.look(self._weights, delta, version=version)
        now = time.perf_counter()
        return PublishStats(
            version=version,
            base_version=None if delta is None else version - 1,
            kind=kind,
            digest=int(manifest.digest, 16),
            numel=manifest.numel,
            nnz=0 if kind == "unchanged" else manifest.nnz,
            delta_bytes=delta_bytes,
            anchor_bytes=anchor_bytes,
            dense_bytes=self._weights.layout.num_bytes,
            compression=self._weights.options.compression,
            diff_s=compared - began,
            upload_s=now - compared,
            total_s=now - began,
            postponed=postponed,
            run=self.run,
            ended_at=time.time(),
            phases=(("compare", 0.0, compared - began), ("upload", compared - began, now - began)),
            warnings=(*warnings, *self._hint(delta)),
        )

    def _hint(self, delta: Plan | None) -> tuple[str, ...]:
        """Say once that of a narrower dtype less would change."""
        layout = self._weights.layout
        numels = (s.numel for s in layout.specs if s.dtype.name in ("float32", "float64"))
        numel = layout.numel
        if delta is None or self._is_hinted or min(delta.nnz, sum(numels)) <= numel / 2:
            return ()
        self._is_hinted = True
        text = (
            f"{delta.nnz / numel:.2%} of the elements changed, and most are float32: if engines "
            "hold bfloat16, publish that, which steps change less: "
            "SenderOptions(wire_dtypes={'*': 'bfloat16'})"
        )
        logger.warning("v%d: %s", self.version, text)
        return (text,)


def _weights_of(source: WeightSource | LocalWeights, options: SenderOptions | None) -> LocalWeights:
    if not isinstance(source, LocalWeights):
        options = options or SenderOptions()
        if "compression" not in options.model_fields_set:
            options = options.model_copy(update={"compression": "gap"})
    return local_weights(source, options)


@contextmanager
def _spooled(frames: Iterable[Frame]) -> Iterator[SpooledTemporaryFile[bytes]]:
    """A temporary file with these frames. Raises StoreRefused if there is no room for it."""
    spool = SpooledTemporaryFile[bytes](max_size=_IN_MEMORY_BYTES)
    try:
        try:
            put_frames(frames, spool)
            spool.flush()
        except OSError as error:
            raise StoreRefused(
                f"no room for what is to be uploaded: {error.strerror or error}; set TMPDIR to a "
                "folder with space"
            ) from error
        yield spool
    finally:
        with suppress(OSError):  # what could not be written is tried once more
            spool.close()


def _digests_of(ledger: Ledger, numbers: Iterable[int]) -> Changed:
    """(number, digest) of these parameters."""
    digests = ledger.by_share()  # all of each, in the order of the layout
    return [(number, digest_text(int(digests[number]))) for number in numbers]
