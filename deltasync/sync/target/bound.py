"""The live weights of a receiver, bound to the layout of its sender, and the sync under way."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
from torch import Tensor

from deltasync.delta.ledger import Ledger, digest_text
from deltasync.delta.payloads import PayloadReader, check_begin
from deltasync.delta.shard import whole
from deltasync.delta.staging import LiveWeights, Received, Staging, staged_bytes_of
from deltasync.delta.tiles import Ints, Space
from deltasync.errors import (
    DeltaSyncError,
    DigestMismatch,
    LayoutMismatch,
    TargetMoved,
)
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.protocol.receiver_session import Event
from deltasync.sync.target.base import WeightTarget
from deltasync.wire.messages import Begin, Bucket, Held, ParameterSpec

logger = logging.getLogger(__name__)

_MIN_STAGED_BYTES = 64 << 20
# Elements of a layout, of each tile of which tables have a row, whether it is held or not.
_ALWAYS_TAKEN, _MOST_TIMES_HELD = 1 << 36, 64
_EARLY_S = 1.0  # an early check of storage counts for so long


class BoundWeights:
    """A target's weights, their digests, and what a sync does with them.

    Knows nothing of connections. The caller holds its lock during each call.

    Args:
        target: The live weights.
        options: Memory, scrub, kernels.
        on: Called with "writing" before weights are written, with "committed" when all of a sync is
            written and read back, and with "restored" when the old version is back.

    Attributes:
        target: The same.
        live: The weights, bound to a layout. Their ledger is replaced by a sync's own when that is
            written.
        staging: What brings the sync under way into the weights; None if there is none.
        proved: The digests of the version that was last joined or committed, over all that is held.
        may_differ: Whether the weights may have been changed or moved; `are_kept` looks.
        payloads: What reads the payloads of each lane, once it has been told of their shares.
        progress: Lets the next payload arrive; called before one is staged, in its midst and after.
        are_private: Whether nobody else can write to payloads.
        still_since: Since when no storage is replaced, by the monotonic clock, so that it can be
            checked before it is written; infinite if it may be replaced at any time.
    """

    def __init__(
        self, target: WeightTarget, options: ReceiverOptions, on: Callable[[Event], None]
    ) -> None:
        self.target, self._options, self._on = target, options, on
        self._writing = partial(on, "writing")
        self.progress: Callable[[], None] = lambda: None
        self.are_private = False
        self.live = LiveWeights({}, Space(()))
        self._before = self.live.ledger  # what `undo` goes back to
        self.staging: Staging | None = None
        self.proved: Ledger | None = None
        self.may_differ = False
        self._changed: set[int] = set()  # numbers of parameters, by the sync under way
        self.payloads = PayloadReader(self.live)
        self._scrubbed = 0  # the chunk after the last one
        self._max_staged_bytes = 0
        self._is_full = False  # the sync under way
        self.still_since = math.inf
        self._checked_s = -math.inf  # when storage was checked early, and what that found
        self._moved: TargetMoved | None = None

    def bind(self, specs: tuple[ParameterSpec, ...], *, lanes: int, world: int) -> None:
        """Find the weights of a layout and measure them.

        Args:
            specs: The layout.
            lanes: Connections on which buckets come.
            world: Ranks of the engine, which hold weights too.

        Raises:
            LayoutMismatch: It is not that of this engine's model.
        """
        flats, options, space = self.target.bind(specs), self._options, Space(whole(specs))
        if specs and not flats and world == 1:
            raise LayoutMismatch("the engine holds none of the parameters that are sent")
        held, numel = sum(f.numel for f in flats.values()), int(space.share_numel.sum())
        if numel > _ALWAYS_TAKEN + _MOST_TIMES_HELD * world * held:
            raise LayoutMismatch(
                f"{numel} elements are sent, and one rank of {world} holds {held}: another model"
            )
        tensors = (tensor for flat in flats.values() for _, tensor in flat.boxes())
        is_frozen = any(getattr(one, "_is_frozen_param", False) for one in tensors)  # as of now
        if is_frozen or getattr(sys.modules.get("torch._inductor.config"), "freezing", False):
            logger.warning(
                "torch.compile freezes these weights (`torch._inductor.config.freezing`): its code "
                "computes with copies, which no update reaches. Turn that off, and compile again"
            )
        self.live = LiveWeights(flats, space, kernels=options.kernels)
        self.live.ledger.sums[:] = self.live.measure(np.arange(self.live.space.num_chunks))
        self.may_differ = False
        self.payloads = PayloadReader(self.live, lanes)
        limit = options.max_staged_bytes
        self._max_staged_bytes = (
            max(_MIN_STAGED_BYTES, self.live.num_bytes // 4) if limit is None else limit
        )

    @property
    def are_proved(self) -> bool:
        """Whether the weights have the digests of the version that was last joined or committed.

        Not so from the moment when they are bound for another version until that is committed.
        """
        now, then = self.live.ledger, self.proved
        if then is None or now is then:
            return then is not None
        is_same = now.space.given == then.space.given
        return is_same and np.array_equal(now.sums, then.sums)

    def held(self, *, half_written: bool) -> Held:
        """What the sender hears of these weights."""
        flats = self.live.flats
        return Held(
            digest=digest_text(self.live.ledger.total),
            parts=tuple((n, f.numel) for n, f in flats.items() if f.held(0, 0) is not None),
            half_written=half_written,
            max_staged_bytes=self._max_staged_bytes,
        )

    def are_kept(self) -> bool:
        """Whether weights that `may_differ` are where they were and have the ledger's digests.

        Looks once: it is True until they may differ again.
        """
        if not self.may_differ:
            return True
        self.may_differ = False
        try:
            self.target.check_unmoved()
        except TargetMoved:
            return False
        return not len(self._wrong(self.live.ledger))

    def scrub(self) -> str | None:
        """The name of a parameter that changed although no sync touched it, or None.

        Each call measures a share of the weights, the next one the share after that.
        """
        ledger, every = self.live.ledger, self._options.scrub_every
        total = len(ledger.sums)
        if not every or not total:
            return None
        chunks = (self._scrubbed + np.arange(-(-total // every))) % total
        self._scrubbed = int(chunks[-1]) + 1
        wrong = self._wrong(ledger, chunks)
        return self._names(wrong)[0] if len(wrong) else None

    def _names(self, chunks: Ints) -> list[str]:
        """The parameters of chunks of the ledger."""
        shares = self.live.space.given
        return [shares[n].spec.name for n in self.live.ledger.parameter_of(chunks).tolist()]

    def _wrong(self, ledger: Ledger, chunks: Ints | None = None) -> Ints:
        """int64[n]: which of these chunks, or of all, are other in memory than a ledger says."""
        chunks = np.arange(len(ledger.sums)) if chunks is None else chunks
        found: Ints = chunks[self.live.measure(chunks) != ledger.sums[chunks]]
        return found

    def check_early(self) -> None:
        """Check where storage is before `write` needs it, if it stays there until then.

        `predict` raises what this finds.
        """
        now = time.monotonic()
        is_recent = self._is_checked and now < self._checked_s + _EARLY_S
        if is_recent or now < self.still_since:
            return
        self._checked_s, self._moved = now, None
        try:
            self.target.check_unmoved()
        except TargetMoved as error:
            self._moved = error

    @property
    def _is_checked(self) -> bool:
        return self._checked_s >= self.still_since

    def begin(self, begin: Begin) -> None:
        """Prepare to stage a sync.

        Raises:
            DigestMismatch: The weights are not those that were measured.
            LimitExceeded: No sync of this layout is so large.
        """
        if not self.are_kept():
            raise DigestMismatch("weights changed or moved while they were detached; rejoin")
        check_begin(begin, self.live.space)
        self.payloads.begin(begin)
        self._is_full = begin.base_version is None
        if self._is_full:
            self.target.check_full_sync()
        needed = staged_bytes_of(payload_bytes=begin.payload_bytes, places=begin.places)
        self.staging = Staging(
            self.live,
            max_bytes=needed,
            in_place=needed > self._max_staged_bytes,
            writing=self._writing,
        )
        self.check_early()

    def stage(self, bucket: Bucket, payload: Tensor | None, lane: int = 0) -> Received:
        """Check a bucket and stage it; in place, write it. Returns what it had.

        Args:
            bucket: What announced the payload.
            payload: uint8[n]; not owned.
            lane: The connection on which it has come.
        """
        assert self.staging is not None
        received = self.payloads.read(bucket, payload, lane, is_private=self.are_private)
        self.staging.stage(received, self.progress)
        self.progress()
        return received

    def predict(self) -> tuple[int, int]:
        """(the digest that the weights will have, bytes held for that). Raises TargetMoved."""
        assert self.staging is not None
        if self._is_checked and self._moved is not None:
            raise self._moved
        if self._derives:
            self._changed = self.staging.ledger.changed_since(self.live.ledger)
        return self.staging.ledger.total, self.staging.staged_bytes

    def write(self, *, heals: bool) -> tuple[int, float]:
        """Write what is staged and read it back; if that fails, put the old version back.

        Args:
            heals: Whether all weights count as changed, since an earlier write has not ended.

        Returns:
            The digest of the weights, and the seconds that it took.

        Raises:
            TargetMoved: Storage was replaced. Nothing was written.
            DigestMismatch: What was read back is not what was written.
        """
        staging = self.staging
        assert staging is not None
        if not self._is_checked:
            self.target.check_unmoved()
        began, self._before = time.perf_counter(), self.live.ledger
        self._writing()
        try:
            digest = staging.commit()
            if self._derives:
                self.target.finish(None if heals or self._is_full else self._changed)
            if self._is_full:
                self._check_finished(staging.ledger)
            self._on("committed")
        except BaseException:
            self.undo()
            raise
        self.live.ledger = self.proved = staging.ledger
        return digest, time.perf_counter() - began

    def _check_finished(self, ledger: Ledger) -> None:
        """Raise DigestMismatch, by name, if the target has changed what was written.

        It reads everything once more, unless the target derives nothing.
        """
        wrong = self._wrong(ledger) if self._derives else np.zeros(0, np.int64)
        if len(wrong):
            names = set(self._names(wrong))
            raise DigestMismatch(
                f"{len(names)} parameters, {min(names)!r} among them, are not what was written: "
                "the engine changes its layout after loading"
            )

    @property
    def _derives(self) -> bool:
        """Whether the target has something to do after a write."""
        return type(self.target).finish is not WeightTarget.finish

    def undo(self) -> None:
        """Put the old version back; the weights stay dirty unless that is proved to be done."""
        assert self.staging is not None
        with suppress(DeltaSyncError, RuntimeError, MemoryError):  # torch's own are RuntimeErrors
            self.staging.undo()
            self.target.finish()
            if self._is_full:
                self._check_finished(self._before)
            self.live.ledger = self.proved = self._before
            self._on("restored")
