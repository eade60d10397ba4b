"""Syncs as traces: one a version over two processes, without a word about it on the wire."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, subscribe
from deltasync.errors import ConfigError
from deltasync.testing.processes import Child
from deltasync.transports import shared_memory
from tests.observe.made import failed, published, received, sync

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import StatusCode

from deltasync.observe.spans import Spans, id_generator, ids_of, traceparent

VERSIONS = 3


class Traced:
    """A provider of one process, and what it exports."""

    def __init__(self, *, chooses_ids: bool = True) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(id_generator=id_generator() if chooses_ids else None)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def told(span: ReadableSpan) -> dict[str, Any]:
    trace_id, span_id = ids(span)
    return {
        "name": span.name,
        "trace": f"{trace_id:032x}",
        "id": f"{span_id:016x}",
        "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
        "kind": span.kind.name,
        "begin": span.start_time,
        "end": span.end_time,
        "attributes": dict(span.attributes or {}),
    }


def trainer(folder: Path) -> None:
    traced, model = Traced(), nn.Linear(32, 8)
    with (
        subscribe(Spans(traced.provider)),
        WeightSender(ModuleSource(model), shared_memory.Sender(folder / "link")) as sender,
    ):
        sender.wait_for_receivers(1, timeout_s=60)
        for _ in range(VERSIONS):
            with torch.no_grad():
                model.weight[0] += 1
            sender.send_weights(timeout_s=30)
        spans = [told(span) for span in traced.spans]
        (folder / "trainer").write_text(json.dumps([sender.stream_id, os.getpid(), spans]))


def engine(folder: Path) -> None:
    traced = Traced()
    link = shared_memory.Receiver(folder / "link")
    with (
        subscribe(Spans(traced.provider)),
        WeightReceiver(ModuleTarget(nn.Linear(32, 8)), link) as receiver,
    ):
        for _ in range(VERSIONS):
            receiver.receive_weights(timeout_s=60)
        spans = [told(span) for span in traced.spans]
        (folder / "engine").write_text(json.dumps([os.getpid(), spans]))


@pytest.mark.promise(
    "What operators see",
    "Trainer and engines make one trace of a version, and nothing about it is sent.",
)
def test_two_processes_make_one_trace_of_each_version(tmp_path: Path) -> None:
    with Child(trainer, tmp_path) as one, Child(engine, tmp_path) as other:
        one.wait(timeout_s=80)
        other.wait(timeout_s=80)
    stream_id, sender_pid, sent = json.loads((tmp_path / "trainer").read_text())
    receiver_pid, got = json.loads((tmp_path / "engine").read_text())
    assert sender_pid != receiver_pid
    for version in range(1, VERSIONS + 1):
        _, trace_id, root_id, _ = traceparent(stream_id, version).split("-")
        here = [span for span in sent if span["trace"] == trace_id]
        there = [span for span in got if span["trace"] == trace_id]
        (root,) = [span for span in here if span["name"] == "deltasync.sync"]
        assert (root["id"], root["parent"], root["kind"]) == (root_id, None, "PRODUCER")
        assert root["attributes"]["deltasync.version"] == version
        first = "capture" if version == 1 else "compare"
        names = [span["name"] for span in here if span["parent"] == root_id]
        assert names == [f"deltasync.{name}" for name in (first, "send", "wait", "commit")]
        (receive,) = [span for span in there if span["name"] == "deltasync.receive"]
        assert (receive["parent"], receive["kind"]) == (root_id, "CONSUMER")
        names = [span["name"] for span in there if span["parent"] == receive["id"]]
        assert names == [f"deltasync.{name}" for name in ("stage", "wait", "ready", "commit")]
        for span in (*here, *there):
            assert span["begin"] <= span["end"]
        assert root["begin"] <= receive["begin"] <= root["end"]  # one clock: they are on one host
    assert len({span["id"] for span in sent + got}) == len(sent) + len(got)


def test_without_chosen_ids_all_are_children_of_the_version() -> None:
    traced = Traced(chooses_ids=False)
    spans = Spans(traced.provider)
    spans(sync())
    spans(received())
    trace_id, root_id = ids_of("run", 2)
    tops = [span for span in traced.spans if span.parent and span.parent.span_id == root_id]
    assert sorted(span.name for span in tops) == ["deltasync.receive", "deltasync.sync"]
    assert {ids(span)[0] for span in traced.spans} == {trace_id}


def test_a_version_has_one_root_whatever_happens() -> None:
    traced = Traced()
    spans = Spans(traced.provider)
    spans(failed(stream_id="run"))  # the first attempt
    spans(sync())
    spans(sync())  # receivers that join later
    roots = [span for span in traced.spans if span.parent is None]
    assert [ids(span) for span in roots] == [ids_of("run", 2)]
    ends = [ids(span)[1] for span in traced.spans]
    assert len(set(ends)) == len(ends)


def test_spans_that_a_processor_makes_meanwhile_have_ids_of_their_own() -> None:
    traced = Traced()

    class Nested(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            if span.name != "nested":
                traced.provider.get_tracer("other").start_span("nested", Context()).end()

    traced.provider.add_span_processor(Nested())
    Spans(traced.provider)(sync())
    ends = [ids(span)[1] for span in traced.spans]
    assert len(set(ends)) == len(ends)
    roots = [span.name for span in traced.spans if ids(span) == ids_of("run", 2)]
    assert roots == ["deltasync.sync"]
    assert {ids(span)[0] for span in traced.spans if span.name == "nested"}.isdisjoint(
        {ids_of("run", 2)[0]}
    )


def test_failures_are_spans_with_an_error() -> None:
    traced = Traced()
    spans = Spans(traced.provider)
    spans(failed(stream_id="run", total_s=2.0))
    spans(failed(role="receiver", stream_id="run", name="a[0/1]", is_dirty=True))
    spans(failed(version=None))  # nothing is known to join
    sent, got = traced.spans
    assert sent.status.status_code is StatusCode.ERROR
    assert sent.status.description == "SyncAborted: nobody took it"
    assert sent.events[0].name == "exception"
    assert sent.end_time is not None
    assert sent.start_time is not None
    assert sent.end_time - sent.start_time == 2_000_000_000
    assert dict(got.attributes or {})["deltasync.dirty"] is True


def test_what_is_published_and_fetched_is_one_trace() -> None:
    traced = Traced()
    spans = Spans(traced.provider)
    spans(published())
    spans(published(kind="unchanged"))
    spans(received(name="store[0/1]"))
    top = [span for span in traced.spans if span.name in ("deltasync.publish", "deltasync.receive")]
    assert len(top) == 2
    assert {ids(span)[0] for span in top} == {ids_of("run", 2)[0]}


def test_the_step_that_is_current_is_linked() -> None:
    traced = Traced()
    tracer = trace.get_tracer("loop", tracer_provider=traced.provider)
    with tracer.start_as_current_span("step") as step:
        Spans(traced.provider)(sync())
    made = next(span for span in traced.spans if span.name == "deltasync.sync")
    assert [link.context.span_id for link in made.links] == [step.get_span_context().span_id]
    assert ids(made) == ids_of("run", 2)
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_both_ends_sample_the_same_versions() -> None:
    sender, receiver = Traced(), Traced()
    here, there = Spans(sender.provider, ratio=0.3), Spans(receiver.provider, ratio=0.3)
    for version in range(300):
        here(sync(version=version))
        there(received(version=version))
    sampled = {ids(span)[0] for span in sender.spans}
    assert sampled == {ids(span)[0] for span in receiver.spans}
    assert 50 < len(sampled) < 140
    with pytest.raises(ConfigError, match="ratio is 1"):
        Spans(ratio=1.5)


def test_ids_are_those_that_are_documented() -> None:
    """Two releases, or other tools, must derive the same ones."""
    expected = "00-454f5618c9aeb1e31e9cc4d1fce64ff3-b0d79f4e7aebfe0e-01"
    assert traceparent("run", 2) == expected
