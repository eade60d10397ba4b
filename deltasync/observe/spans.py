"""Syncs as OpenTelemetry traces: one a version, over all processes that take part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
    set_span_in_context,
)

from deltasync.errors import ConfigError
from deltasync.store.sender import PublishStats
from deltasync.sync.events import Phase, ReceiveStats, SyncEvent, SyncFailed
from deltasync.sync.stats import SyncStats

Attributes = dict[str, str | int | float | bool]

_KINDS = {
    "sender": SpanKind.PRODUCER,
    "publisher": SpanKind.PRODUCER,
    "receiver": SpanKind.CONSUMER,
}
_NAMES = {"sender": "deltasync.sync", "publisher": "deltasync.publish"}
_NAMES["receiver"] = "deltasync.receive"
_CHOSEN: ContextVar[tuple[int, int] | None] = ContextVar("deltasync_ids", default=None)
_REMEMBERED = 256  # versions whose root was made


def ids_of(stream_id: str, version: int) -> tuple[int, int]:
    """(trace id, span id) of a version: those of its root span, which no process has to be told.

    The first 16 and the next 8 bytes of the SHA-256 of "deltasync", the run and the version, with a
    zero byte between them.
    """
    digest = hashlib.sha256(f"deltasync\0{stream_id}\0{version}".encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


def traceparent(stream_id: str, version: int) -> str:
    """Return the W3C `traceparent` of a version, for what else should join its trace."""
    trace_id, span_id = ids_of(stream_id, version)
    return f"00-{trace_id:032x}-{span_id:016x}-01"


class Spans:
    """A listener that makes spans of syncs.

    Sender and receivers derive the same trace from the run and the version, so that they need not
    tell each other. A version is one trace. The sender's span has a child for each part of the
    sync; each receiver's span, with its own parts, is a child of the sender's. Attempts that failed
    are spans with an error. The span that is current at the sender is linked.

    The root of a trace has a span id that follows from the version. An SDK chooses ids itself: give
    its provider `id_generator()`, or roots are missing, and all spans of a version are children of
    one that no process has exported.

    Args:
        provider: Where spans go; None for the global one.
        ratio: Share of the versions that is sampled, the same ones in all processes that have the
            same ratio. A parent-based sampler, the default of SDKs, obeys.
    """

    def __init__(self, provider: TracerProvider | None = None, *, ratio: float = 1.0) -> None:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"ratio is {ratio}; give a share from 0 to 1")
        self._provider, self._bound = provider, round(ratio * (1 << 64))
        self._rooted: dict[tuple[str, int], None] = {}  # in order

    def __call__(self, event: SyncEvent) -> None:
        """Make the spans of an event."""
        match event:
            case SyncStats():
                self._trace(event, "sender", event.stream_id, _of_sync(event))
            case PublishStats() if event.kind != "unchanged":
                self._trace(event, "publisher", event.run, _of_publish(event))
            case ReceiveStats():
                self._trace(event, "receiver", event.stream_id, _of_receive(event))
            case SyncFailed(stream_id=str(stream_id), version=int()):
                self._trace(event, event.role, stream_id, _of_failure(event))

    def _trace(
        self,
        event: SyncStats | PublishStats | ReceiveStats | SyncFailed,
        role: str,
        stream_id: str,
        attributes: Attributes,
    ) -> None:
        version = event.version
        assert version is not None
        ids = ids_of(stream_id, version)
        is_sampled = ids[0] & (1 << 64) - 1 < self._bound
        if not is_sampled:
            return
        tracer = trace.get_tracer("deltasync", tracer_provider=self._provider)
        is_root = isinstance(event, PublishStats | SyncStats)
        begin = event.ended_at - event.total_s
        current = trace.get_current_span().get_span_context()
        attributes |= {"deltasync.stream_id": stream_id, "deltasync.version": version}
        with self._parent(stream_id, version, ids, is_root=is_root) as context:
            span = tracer.start_span(
                _NAMES[role],
                context,
                kind=_KINDS[role],
                attributes=attributes,
                links=[Link(current)] if current.is_valid else (),
                start_time=_nanoseconds(begin),
            )
        if isinstance(event, SyncFailed):
            span.record_exception(event.error, timestamp=_nanoseconds(event.ended_at))
            span.set_status(Status(StatusCode.ERROR, event.reason))
        _add_phases(tracer, span, event.phases, begin)
        span.end(_nanoseconds(event.ended_at))

    @contextmanager
    def _parent(
        self, stream_id: str, version: int, ids: tuple[int, int], *, is_root: bool
    ) -> Iterator[Context]:
        """The context of a new span: no parent for the root, if its ids can be chosen."""
        key = (stream_id, version)
        if not (is_root and self._chooses_ids and key not in self._rooted):
            flags = TraceFlags(TraceFlags.SAMPLED)
            parent = SpanContext(*ids, is_remote=True, trace_flags=flags)
            yield set_span_in_context(NonRecordingSpan(parent), Context())
            return
        self._rooted[key] = None
        if len(self._rooted) > _REMEMBERED:
            del self._rooted[next(iter(self._rooted))]
        token = _CHOSEN.set(ids)
        try:
            yield Context()
        finally:
            _CHOSEN.reset(token)

    @property
    def _chooses_ids(self) -> bool:
        provider = self._provider or trace.get_tracer_provider()
        return getattr(getattr(provider, "id_generator", None), "is_of_deltasync", False)


def id_generator() -> Any:
    """Return an `IdGenerator` of the SDK, for `TracerProvider(id_generator=...)`.

    Roots of traces get the ids of their versions, other spans random ones, as without it. Needs
    `opentelemetry-sdk`.
    """
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class SyncIds(RandomIdGenerator):
        is_of_deltasync = True

        def generate_trace_id(self) -> int:
            chosen = _CHOSEN.get()
            return super().generate_trace_id() if chosen is None else chosen[0]

        def generate_span_id(self) -> int:
            if (chosen := _CHOSEN.get()) is None:
                return super().generate_span_id()
            _CHOSEN.set(None)  # it comes last, and the span's processors may make others
            return chosen[1]

    return SyncIds()


def _add_phases(tracer: Tracer, span: Span, phases: tuple[Phase, ...], begin: float) -> None:
    context = set_span_in_context(span, Context())
    for name, start, end in phases:
        child = tracer.start_span(
            f"deltasync.{name}", context, start_time=_nanoseconds(begin + start)
        )
        child.end(_nanoseconds(begin + end))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _of_sync(stats: SyncStats) -> Attributes:
    return {
        "deltasync.kind": stats.kind,
        "deltasync.density": stats.density,
        "deltasync.payload_bytes": stats.payload_bytes,
        "deltasync.dense_bytes": stats.dense_bytes,
        "deltasync.receivers": stats.receivers,
        "deltasync.lost": len(stats.lost),
        "deltasync.full_synced": stats.full_synced,
        "deltasync.attempts": stats.attempts,
    }


def _of_publish(stats: PublishStats) -> Attributes:
    return {
        "deltasync.kind": stats.kind,
        "deltasync.density": stats.density,
        "deltasync.payload_bytes": stats.delta_bytes + stats.anchor_bytes,
        "deltasync.dense_bytes": stats.dense_bytes,
    }


def _of_receive(stats: ReceiveStats) -> Attributes:
    return {
        "deltasync.kind": stats.kind,
        "deltasync.receiver": stats.name,
        "deltasync.payload_bytes": stats.num_bytes,
        "deltasync.pause_s": stats.pause_s,
        "deltasync.in_place": stats.is_in_place,
    }


def _of_failure(event: SyncFailed) -> Attributes:
    found: Attributes = {"deltasync.kind": "failed", "deltasync.lost": len(event.lost)}
    if event.name:
        found |= {"deltasync.receiver": event.name, "deltasync.dirty": event.is_dirty}
    return found
