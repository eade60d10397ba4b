"""A reader says what it needs, so that nobody deletes it meanwhile."""

from __future__ import annotations

import logging
import math
import secrets
import time
from contextlib import suppress

from deltasync.errors import StoreError, StoreRefused
from deltasync.store import keys
from deltasync.store.catalogue import Run
from deltasync.store.manifest import Lease, canonical
from deltasync.store.objects import started

logger = logging.getLogger(__name__)
LEASE_S = 3600
_REFRESH_S = LEASE_S / 3
_RETRY_S = 30.0
_PARTING_S = 5.0


class Leaseholder:
    """The lease of one reader. A store that it cannot write to is read without a lease.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._holder = run, secrets.token_hex(16)
        self._last: tuple[int | None, int] | None = None
        self._written_s = self._next_s = 0.0
        self._is_warned = self._may_exist = self._is_dropped = False

    def refresh(self, *, holds: int | None, version: int) -> None:
        """Need all that leads from the version held to `version`, for an hour from now on.

        Call it often: it writes only what is not fresh. A store that refuses is not asked again.
        """
        now, wanted = time.monotonic(), (holds, version)
        is_fresh = wanted == self._last and now < self._written_s + _REFRESH_S
        if is_fresh or now < self._next_s or self._is_dropped:
            return
        lease = Lease(
            run=self._run.name, holder=self._holder, holds=holds, version=version, seconds=LEASE_S
        )
        try:
            self._may_exist = True
            self._run.objects.put(keys.lease_key(self._holder), canonical(lease))
        except StoreError as error:
            self._next_s = math.inf if isinstance(error, StoreRefused) else now + _RETRY_S
            if not self._is_warned:
                logger.warning("reads without a lease, what it needs may be deleted: %s", error)
            self._is_warned = True
            return
        self._last, self._written_s = wanted, now
        if self._is_dropped:  # by another thread, meanwhile
            self.drop()

    def renew(self) -> None:
        """Need the same for longer, if anything. Call it often while nothing is fetched."""
        if self._last is not None:
            holds, version = self._last
            self.refresh(holds=holds, version=version)

    def drop(self) -> None:
        """Need nothing any more. Any thread may call it; it writes no lease afterwards.

        A store that does not answer is not waited for: leases expire.
        """
        self._is_dropped = True
        if self._may_exist:
            deleted = started(self._run.objects.delete, keys.lease_key(self._holder))
            with suppress(StoreError, TimeoutError):
                deleted.result(_PARTING_S)
