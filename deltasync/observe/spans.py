"""Syncs as OpenTelemetry traces: one a version, over all processes that take part."""

from __future__ import annotations

import hashlib

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    set_span_in_context,
)

from deltasync.observe.flat import flat
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, SyncEvent, SyncFailed
from deltasync.sync.stats import SyncStats

_SPANS = {
    "sender": ("deltasync.sync", SpanKind.PRODUCER),
    "publisher": ("deltasync.publish", SpanKind.PRODUCER),
    "receiver": ("deltasync.receive", SpanKind.CONSUMER),
}


def ids_of(stream_id: str, version: int) -> tuple[int, int]:
    """(trace id, span id) of a version, which each process derives: the parent of all its spans.

    The first 16 and the next 8 bytes of the SHA-256 of "deltasync", the run and the version, with a
    zero byte between them.
    """
    digest = hashlib.sha256(f"deltasync\0{stream_id}\0{version}".encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


class Spans:
    """A listener that makes spans of syncs.

    A version is one trace. Trainer and engines derive its ids from the run and the version, so they
    need not send each other any. Each end has a span, and that has a child for each part of the
    sync. An attempt that failed is a span with an error. The span that is current at an end is
    linked.

    Args:
        provider: Where spans go; None for the global one.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider

    def __call__(self, event: SyncEvent) -> None:
        """Make the spans of an event."""
        match event:
            case SyncStats():
                self._trace(event, "sender", event.stream_id, event.version)
            case PublishStats() if event.kind != "unchanged":
                self._trace(event, "publisher", event.run, event.version)
            case ReceiveStats():
                self._trace(event, "receiver", event.stream_id, event.version)
            case SyncFailed(stream_id=str(stream_id), version=int(version)):
                self._trace(event, event.role, stream_id, version)

    def _trace(
        self,
        event: SyncStats | PublishStats | ReceiveStats | SyncFailed,
        role: str,
        stream_id: str,
        version: int,
    ) -> None:
        tracer = trace.get_tracer("deltasync", tracer_provider=self._provider)
        begin, current = event.ended_at - event.total_s, trace.get_current_span().get_span_context()
        sampled = TraceFlags(TraceFlags.SAMPLED)
        parent = SpanContext(*ids_of(stream_id, version), is_remote=True, trace_flags=sampled)
        name, kind = _SPANS[role]
        span = tracer.start_span(
            name,
            set_span_in_context(NonRecordingSpan(parent), Context()),
            kind=kind,
            attributes={
                **flat(event, prefix="deltasync."),
                "deltasync.version": version,
                "deltasync.stream_id": stream_id,
                "deltasync.kind": getattr(event, "kind", "failed"),
                "deltasync.receiver": getattr(event, "name", ""),
            },
            links=[Link(current)] if current.is_valid else (),
            start_time=_nanoseconds(begin),
        )
        if isinstance(event, SyncFailed):
            span.record_exception(event.error, timestamp=_nanoseconds(event.ended_at))
            span.set_status(Status(StatusCode.ERROR, event.reason))
        within = set_span_in_context(span, Context())
        for phase, start, end in event.phases:
            child = tracer.start_span(
                f"deltasync.{phase}", within, start_time=_nanoseconds(begin + start)
            )
            child.end(_nanoseconds(begin + end))
        span.end(_nanoseconds(event.ended_at))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
