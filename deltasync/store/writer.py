"""The writing end of a run: one version after another, each real once its manifest is there."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from deltasync.delta.ledger import digest_text
from deltasync.errors import ConfigError, ObjectDamaged, StoreRefused, WriterConflict
from deltasync.store import keys
from deltasync.store.catalogue import Published, Run, layout_bytes
from deltasync.store.manifest import (
    Anchor,
    Manifest,
    Way,
    Written,
    canonical,
    sha256_of,
    signed,
)
from deltasync.store.objects import Objects
from deltasync.sync.source.layout import SentLayout
from deltasync.wire.messages import Count, Digest

logger = logging.getLogger(__name__)

_MAX_NAME = 200  # characters of a host
Changed = Sequence[tuple[Count, Digest]]


class RunWriter:
    """Writes manifests. It does not know what weights are.

    Args:
        objects: Of the run.
        run_id: Its id; None for that of the versions that are there, or a new one.

    Attributes:
        run: To read what is there.
        run_id: As given until `start`, then that of the run.
        head: The version that the next one follows; None before the first.
        name: Names this writer in all that it writes: no other has it.
    """

    def __init__(self, objects: Objects, run_id: str | None) -> None:
        self.run, self.run_id = Run(objects), run_id
        self.head: Published | None = None
        self.name = f"{uuid.uuid4().hex} {socket.gethostname()[:_MAX_NAME]}:{os.getpid()}"
        self._lost: str | None = None
        self._layouts: set[str] = set()

    @property
    def next_version(self) -> int:
        """What the next manifest is of. The first version of a run is 1."""
        return 1 if self.head is None else self.head.version + 1

    def start(self) -> Published | None:
        """Find the newest version, which is `head` then. Raises ConfigError if `run_id` differs."""
        head = self.run.newest()
        if head is not None and self.run_id not in (None, head.manifest.run):
            raise ConfigError(
                f"{self.run.objects.url} has run {head.manifest.run!r}, and `stream_id` is "
                f"{self.run_id!r}: give each run a URL of its own, or no `stream_id` to go on"
            )
        self.run_id = head.manifest.run if head else self.run_id or uuid.uuid4().hex
        self.head = head
        return head

    def check_alone(self) -> None:
        """Raise WriterConflict if another writer was found."""
        if self._lost is not None:
            raise WriterConflict(self._lost)

    def check_there(self) -> None:
        """Raise StoreRefused if the run is gone: readers would find none of what follows."""
        if self._is_head_gone() and not self.run.versions():
            raise StoreRefused(
                f"{self.run.objects.url}: all versions are gone: look whether the store is "
                "mounted, or restore it; to begin again, make another StoreSender"
            )

    def put_layout(self, layout: SentLayout) -> None:
        """Write the parameters, which all versions of this layout share."""
        if layout.hash in self._layouts:
            return
        key = keys.layout_key(layout.hash)
        if not self.run.objects.create(key, layout_bytes(layout.specs)):
            raise ObjectDamaged(f"{key} was altered: restore it, or begin another run")
        self._layouts.add(layout.hash)

    def manifest(
        self, layout: SentLayout, way: Way, *, digest: int, nnz: int, changed: Changed
    ) -> Manifest:
        """The manifest of the next version, as `commit` writes it.

        Args:
            layout: What was `put_layout`.
            way: What was written.
            digest: State digest of the version.
            nnz, changed: As in `Manifest`.
        """
        assert self.run_id is not None
        return signed(
            Manifest(
                run=self.run_id,
                version=self.next_version,
                writer=self.name,
                written_at=_now(),
                parent=None if self.head is None else self.head.sha256,
                way=way,
                digest=digest_text(digest),
                layout_hash=layout.hash,
                numel=layout.numel,
                nnz=nnz,
                changed=tuple(changed),
            ),
            self.run.objects.options.mac,
        )

    def commit(self, manifest: Manifest) -> Published:
        """Write a manifest: the version exists, and is `head`. The same one can be tried again.

        Raises:
            WriterConflict: There is another manifest of this version. This object then does nothing
                more.
            ObjectDamaged: An object that it names is gone. The version does not exist, and never
                will by this manifest.
            StoreUnavailable: The manifest may be there, or may not. Only `commit` of the same one
                finds out.
        """
        self.check_alone()
        data, key = canonical(manifest), keys.manifest_key(manifest.version)
        self._check_whole(manifest)
        if self._is_overtaken(manifest) or not self.run.objects.create(key, data):
            self._lost = (
                f"{self.run.objects.url}: another writer has published v{manifest.version}: let "
                "one trainer publish to a URL, and start this one again"
            )
            raise WriterConflict(self._lost)
        self.head = Published(manifest, sha256_of(data))
        return self.head

    def add_anchor(self, way: Way) -> None:
        """Write an anchor of `head`. Raises ObjectDamaged if an object of it is gone."""
        assert self.head is not None
        self.check_alone()
        anchor = Anchor(
            run=self.head.manifest.run,
            version=self.head.version,
            writer=self.name,
            written_at=_now(),
            manifest=self.head.sha256,
            way=way,
        )
        self._check_whole(anchor)
        data = canonical(signed(anchor, self.run.objects.options.mac))
        self.run.objects.create(keys.anchor_key(anchor.version), data)  # or it has one already

    def _is_overtaken(self, manifest: Manifest) -> bool:
        """Whether other versions have come, and gc has deleted that of this number.

        It never deletes the newest one, so the version before is there as long as no other came.
        """
        is_first = self.head is None
        is_passed = bool(self.run.versions(after=1)) if is_first else self._is_head_gone()
        return is_passed and self.run.published(manifest.version) is None

    def _is_head_gone(self) -> bool:
        head = self.head
        return head is not None and self.run.objects.head(keys.manifest_key(head.version)) is None

    def _check_whole(self, written: Written) -> None:
        """Raise ObjectDamaged if an object of what does not exist yet is gone.

        `gc` deletes objects that no manifest names after a while, and this process may have slept.
        """
        objects = self.run.objects
        for file in written.way.files:
            facts = objects.head(file.key)
            if facts is not None and facts.num_bytes == file.bytes:
                continue
            if isinstance(written, Manifest) and self.run.published(written.version) is not None:
                return  # an earlier attempt has arrived, or another writer has won
            raise ObjectDamaged(
                f"{objects.url}: {file.key} was deleted or altered before v{written.version} was "
                "published, as gc does if this process slept meanwhile: publish again"
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
