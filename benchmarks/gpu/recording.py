"""What a process does when: the functions of the library that count, and kernels of its GPU."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

End = Literal["trainer", "engine"]
LANES = ("trainer", "trainer's GPU", "engine", "engine's GPU")
"""Where things happen."""
_OTHER = "other"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's events

# What counts as one thing: of each module, functions, and what they are called. What is called
# within another counts for itself.
_POINTS: dict[End, dict[str, dict[str, str]]] = {
    "trainer": {
        "deltasync.sync.sender": {
            "WeightSender.send_weights": _OTHER,
            "stats_of": "make the stats",
        },
        "deltasync.sync.source.weights": {"SourceLayout.refresh": "look up the source"},
        "deltasync.delta.host.backend": {"HostBackend.compare": "compare"},
        "deltasync.delta.host.packing": {"Bucket.write": "pack"},
        "deltasync.delta.batched.backend": {"BatchedBackend.compare": "plan"},
        "deltasync.delta.batched.masks": {
            "Masks.compare": "launch the compare",
            "Masks.counts": "wait for counts",
        },
        "deltasync.delta.batched.plans": {
            "BatchedBucket.write": "pack",
            "BatchedDelta.decided": "advance the snapshot",
            "BatchedDelta.ledger": "wait for digests",
        },
        "deltasync.sync.protocol.links": {
            "SenderLink.buffer": "wait for a buffer",
            "SenderLink.send": "send",
            "SenderLink.replies": "wait for replies",
        },
    },
    "engine": {
        "deltasync.sync.receiver": {
            "WeightReceiver.receive_weights": _OTHER,
            "WeightReceiver._reply": "reply",
        },
        "deltasync.sync.protocol.links": {"ReceiverLinks.receive": "wait for messages"},
        "deltasync.sync.target.bound": {
            "BoundWeights.check_early": "check storage",
            "BoundWeights.begin": "begin",
            "BoundWeights.stage": "stage",
            "BoundWeights.predict": "predict digests",
            "BoundWeights.write": "write",
            "BoundWeights.scrub": "scrub",
        },
    },
}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while.

    Attributes:
        lane: One of LANES.
        what: In words; of a GPU the kernel's name.
        begin_ns, end_ns: Nanoseconds, since 1970 or since the sync began.
    """

    lane: str
    what: str
    begin_ns: int
    end_ns: int


class Recording:
    """Notes what this process does, until `stop`. One at a time in a process.

    Args:
        end: Which end it is.
        device: Where its weights are; a GPU's kernels are noted by torch's profiler.

    Attributes:
        calls: When the calls began and ended within which everything else is called.
    """

    def __init__(self, end: End, device: torch.device) -> None:
        self._end: End = end
        self._marks: list[tuple[int, str, bool]] = []  # when, what, and whether it begins
        self.calls: list[tuple[int, int]] = []
        self._replaced: list[tuple[Any, str, Any]] = []
        for module, functions in _POINTS[end].items():
            for path, what in functions.items():
                self._replace(importlib.import_module(module), path, what)
        self._profile: profile | None = None
        if device.type == "cuda":
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()

    def stop(self) -> list[Span]:
        """What was noted, by the clock of `time.time_ns`; on a host nothing overlaps."""
        for owner, name, before in self._replaced:
            setattr(owner, name, before)
        spans = list(_flattened(self._end, self._marks))
        if self._profile is not None:
            self._profile.stop()
            spans += _on_gpu(f"{self._end}'s GPU", self._profile)
        return spans

    def _replace(self, module: Any, path: str, what: str) -> None:
        *owners, name = path.split(".")
        owner = getattr(module, owners[0]) if owners else module
        before = vars(owner)[name]
        now: Any
        if callable(before):
            now = self._noted(before, what)
        elif isinstance(before, property):
            assert before.fget is not None
            now = property(self._noted(before.fget, what))
        else:  # a cached property computes once
            now = type(before)(self._noted(before.func, what))
            now.__set_name__(owner, name)
        setattr(owner, name, now)
        self._replaced.append((owner, name, before))

    def _noted(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        marks, clock, calls = self._marks, time.time_ns, self.calls
        is_whole = what == _OTHER

        @wraps(function)
        def noted(*args: Any, **options: Any) -> Any:
            began = clock()
            marks.append((began, what, True))
            try:
                return function(*args, **options)
            finally:
                ended = clock()
                marks.append((ended, what, False))
                if is_whole:
                    calls.append((began, ended))

        return noted


def _flattened(lane: str, marks: list[tuple[int, str, bool]]) -> Iterator[Span]:
    """At each time the innermost of what is under way."""
    open_: list[str] = []
    for (now, what, begins), (then, *_) in pairwise(marks):
        if begins:
            open_.append(what)
        else:
            open_.pop()
        if open_ and then > now:
            yield Span(lane, open_[-1], now, then)


def _on_gpu(lane: str, done: profile) -> Iterator[Span]:
    """Kernels, copies and fills, from the trace that the profiler exports."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        done.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    base = int(trace.get("baseTimeNanoseconds", 0))
    for event in trace["traceEvents"]:
        if event.get("cat") in _ON_GPU:
            begin = base + round(event["ts"] * 1e3)
            yield Span(lane, _short(event["name"]), begin, begin + round(event["dur"] * 1e3))


def _short(kernel: str) -> str:
    """A name that fits into a picture: torch's own kernels have long ones."""
    name = kernel.partition("(")[0].partition("<")[0].removeprefix("void ")
    if name.startswith("nccl"):
        return "NCCL"
    return name.rpartition("::")[2]
