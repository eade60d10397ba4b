"""Syncs as traces: one a version of both ends, without a word about it on the wire."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from deltasync import subscribe
from deltasync.errors import SyncAborted
from deltasync.observe.flat import flat
from tests.observe.made import failed, published, received, sync
from tests.worlds.links import fleet, until

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import StatusCode

from deltasync.observe.spans import Spans, ids_of

VERSIONS = 3


class Traced:
    """A provider of one process, and what it exports."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == f"deltasync.{name}"]


def facts(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    assert span.parent is not None
    return {
        "name": span.name,
        "trace": f"{span.context.trace_id:032x}",
        "id": f"{span.context.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}",
        "kind": span.kind.name,
        "begin": span.start_time,
        "end": span.end_time,
        "version": (span.attributes or {}).get("deltasync.version"),
    }


@pytest.mark.promise(
    "What operators see",
    "Trainer and engines make one trace of a version, and nothing about it is sent.",
)
def test_both_ends_make_one_trace_of_each_version() -> None:
    """Each in a thread of its own, which knows nothing of a span that is current in the other."""
    traced, model = Traced(), nn.Linear(32, 8)
    with subscribe(Spans(traced.provider)), fleet(model) as here:
        for version in range(1, VERSIONS + 1):
            model.weight.data[0] += 1
            here.join(nn.Linear(32, 8)) if version == 1 else here.sender.send_weights()
            until(lambda v=version: len(traced.of("receive")) == v)  # type: ignore[misc]
    sent_and_got, stream_id = [facts(span) for span in traced.spans], here.sender.stream_id
    # The same in any process.
    assert ids_of("a" * 32, 7) == (0x3624036C0E10F262F13186245CF4189A, 0x5E5446B29CD64E80)
    for version in range(1, VERSIONS + 1):
        trace_number, top_number = ids_of(stream_id, version)
        trace_id, top = f"{trace_number:032x}", f"{top_number:016x}"
        found = [span for span in sent_and_got if span["trace"] == trace_id]
        send, receive = (
            next(span for span in found if span["name"] == f"deltasync.{name}")
            for name in ("sync", "receive")
        )
        assert (send["parent"], send["kind"], send["version"]) == (top, "PRODUCER", version)
        assert (receive["parent"], receive["kind"]) == (top, "CONSUMER")
        first = "capture" if version == 1 else "compare"
        for whole, parts in (
            (send, (first, "send", "wait", "commit")),
            (receive, ("stage", "wait", "ready", "commit")),
        ):
            names = [span["name"] for span in found if span["parent"] == whole["id"]]
            assert names == [f"deltasync.{name}" for name in parts]
        assert all(span["begin"] <= span["end"] for span in found)
        assert send["begin"] <= receive["begin"] <= send["end"]  # one clock: they are on one host


def test_what_fails_is_published_or_fetched_joins_the_trace_of_its_version() -> None:
    traced = Traced()
    spans = Spans(traced.provider)
    tracer = trace.get_tracer("loop", tracer_provider=traced.provider)
    with tracer.start_as_current_span("step") as step:
        spans(failed(stream_id="run", total_s=2.0))
    spans(failed(version=None))  # nothing is known to join
    spans(published())
    spans(published(kind="unchanged"))
    spans(received(name="store[0/1]"))
    trace_id, top = ids_of("run", 2)
    own = [s for s in traced.spans if s.parent is not None and s.parent.span_id == top]
    assert [s.name for s in own] == ["deltasync.sync", "deltasync.publish", "deltasync.receive"]
    assert {s.context.trace_id for s in own if s.context} == {trace_id}
    sent = own[0]
    assert [link.context for link in sent.links] == [step.get_span_context()]
    assert sent.status.status_code is StatusCode.ERROR
    assert sent.status.description == "SyncAborted: nobody took it"
    assert sent.events[0].name == "exception"
    assert (sent.end_time or 0) - (sent.start_time or 0) == 2_000_000_000


def test_ids_are_those_that_are_documented() -> None:
    """Two releases, or other tools, must derive the same ones."""
    assert ids_of("run", 2) == (0x454F5618C9AEB1E31E9CC4D1FCE64FF3, 0xB0D79F4E7AEBFE0E)


def test_events_are_flat_numbers_under_names_that_stay() -> None:
    found = flat(sync(bytes_by_codec={"a b\n": 5}, lost={"a": "b"}))
    for name, number in {
        "commit_s": 0.001,
        "bytes_by_codec/a_b_": 5,
        "lost": 1,
        "failed": 0,
    }.items():
        assert found[f"deltasync/{name}"] == number
    for event in (sync(), received(), published(), failed(), SyncAborted("x")):
        for name, value in flat(event, prefix="sync/").items():
            assert type(value) is float
            assert re.fullmatch(r"sync/[-/\w.]+", name, re.ASCII)
    assert flat(SyncAborted("x")) == {"deltasync/failed": 1.0}
