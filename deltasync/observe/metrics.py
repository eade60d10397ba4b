"""Prometheus metrics of syncs."""

from __future__ import annotations

import builtins
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import nan
from types import ModuleType
from typing import Literal, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.values import MutexValue, ValueClass

from deltasync import errors
from deltasync.errors import ConfigError
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, SyncEvent, SyncFailed
from deltasync.sync.stats import SyncStats

SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of the buckets of all histograms: from half a millisecond to a minute."""

OTHER = "other"
"""The label of everything beyond what labels are bounded to."""

_AWAY_S = 3600.0  # an engine that misses all syncs for so long has left


def _names_of_errors(module: ModuleType) -> frozenset[str]:
    kinds = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return frozenset(name for name, kind in kinds.items() if issubclass(kind, BaseException))


_OTHERS = {"Detached", "OutOfMemoryError"}  # no exceptions, or of torch
_ERRORS = _names_of_errors(errors) | _names_of_errors(builtins) | _OTHERS
_PUT = ("delta", "anchor")
_LIKELY = (*_names_of_errors(errors), *_OTHERS, "MemoryError", "OSError", "RuntimeError", OTHER)
_M = TypeVar("_M", bound=MetricWrapperBase)
_GENERATED = re.compile(
    r"^(engine|rollout)(?:(?:-[0-9a-f]{8}|-[0-9a-f]{16}){1,2}|-[0-9a-f]{32})(?=(?:-\d+)?(?:$|\[))"
)
"""What a new name begins with, of an engine or a worker of verl: its kind, and chance."""


class Metrics:
    """A listener that counts and measures syncs for Prometheus.

    The page on observability lists the metrics. Labels are bounded, whatever peers are called and
    report. In the multiprocess mode of `prometheus_client`, gauges show what a living process set
    last, and a receiver is dirty if it is in one of them. Make one for each registry; a process
    that forked before needs no other one.

    Args:
        registry: Where the metrics are registered; None for the global registry.
        max_names: Most engines, and most receivers, that get a label of their own.

    Raises:
        ConfigError: The registry has metrics of these names already, or PROMETHEUS_MULTIPROC_DIR
            cannot be written. Nothing stays registered.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, max_names: int = 64) -> None:
        if max_names < 1:
            raise ConfigError(f"max_names is {max_names}; give at least 1")
        self._registry = REGISTRY if registry is None else registry
        self._engines, self._receivers = _Names(max_names), _Names(max_names)
        self._away_since: dict[str, float] = {}  # engines without the last version, by label
        self._dirty_names: defaultdict[str, set[str]] = defaultdict(set)  # by label
        self._registered: list[MetricWrapperBase] = []
        try:
            self._make_sender()
            self._make_receiver()
            self._make_publisher()
        except (ValueError, OSError) as error:
            for metric in self._registered:
                self._registry.unregister(metric)
            if isinstance(error, OSError):
                raise ConfigError(f"PROMETHEUS_MULTIPROC_DIR cannot be written: {error}") from error
            raise ConfigError(f"one Metrics is enough for a registry: {error}") from error

    def __call__(self, event: SyncEvent) -> None:
        """Count an event."""
        match event:
            case SyncStats():
                self._sent(event)
            case ReceiveStats():
                self._received(event)
            case PublishStats():
                self._published(event)
            case SyncFailed(role="sender"):
                self._failures[_error(event.error)].inc()
                self._count_lost(event.lost)
                if event.receivers is not None:
                    self._num_receivers.set(event.receivers)
            case SyncFailed(role="publisher"):
                self._publish_failures[_error(event.error)].inc()
            case SyncFailed():
                self._receive_failed(event)

    def _make_sender(self) -> None:
        self._syncs = self._kinds("syncs", "Syncs that receivers took", "delta", "full")
        self._failures = self._errors("sync_failures", "Syncs that no receiver took")
        self._sync_s = self._histogram("sync", "One call of send_weights")
        self._compare_s = self._histogram("compare", "Comparing with the snapshot")
        self._transfer_s = self._histogram("transfer", "First frame until all receivers prepared")
        self._commit_s = self._histogram("commit", "Decision until all receivers committed: pause")
        self._bytes = self._counters("payload_bytes", "Bytes sent to each receiver", "codec")
        self._joined_bytes = self._counter("joined_bytes", "Bytes of full syncs beside deltas")
        self._dense_bytes = self._counter("dense_bytes", "Bytes that dense syncs would have sent")
        self._changed = self._counter("changed_elements", "Elements that differed in deltas")
        self._density = self._gauge("density_ratio", "Share of elements changed, last delta")
        self._full_syncs = self._counter("full_syncs", "Receivers that needed a full sync")
        self._joins = self._counter("joined_receivers", "Receivers that joined")
        self._lost = self._errors("lost_receivers", "Receivers that left", label="reason")
        self._retries = self._counter("retried_attempts", "Attempts beyond the first of a version")
        self._warnings = self._counter("warnings", "Warnings of the sender")
        self._version = self._gauge("version", "The last version decided")
        self._num_receivers = self._gauge("receivers", "Receivers that hold the last version")
        self._engine_version = self._gauges("engine_version", "Version held last", "engine")
        self._sender_bytes = self._gauge("sender_memory_bytes", "Memory beside the snapshot")
        self._snapshot_bytes = self._gauge("snapshot_bytes", "Size of the snapshot")
        self._synced_at = self._gauge("last_sync_timestamp_seconds", "When the last sync ended")

    def _make_receiver(self) -> None:
        self._receives = self._kinds("receiver_syncs", "Syncs received", "delta", "full", "joined")
        self._receive_failures = self._errors("receiver_failures", "Syncs that failed")
        self._stage_s = self._histogram("receiver_stage", "Receiving and staging; engine serves")
        self._write_s = self._histogram("receiver_commit", "Writing and reading back")
        self._pause_s = self._histogram("receiver_pause", "The pause of the engine")
        self._received_bytes = self._counter("receiver_bytes", "Indices and values received")
        self._staged_bytes = self._gauge("receiver_staged_bytes", "Memory of the last staging")
        self._in_place = self._counter("receiver_in_place", "Syncs written as they arrived")
        self._scrubs = self._counter("receiver_scrub_findings", "Scrubs that found corruption")
        self._held = self._gauges("receiver_version", "The version held", "receiver")
        text = "1 while one of this label must not serve"
        self._dirty = self._gauges("receiver_dirty", text, "receiver", "livemax")

    def _make_publisher(self) -> None:
        kinds = ("delta", "anchor", "unchanged")
        self._publishes = self._kinds("published_versions", "Versions published", *kinds)
        self._publish_failures = self._errors("publish_failures", "Calls that failed")
        self._published_bytes = self._counters("published_bytes", "Bytes written", "object", *_PUT)
        self._publish_s = self._histogram("publish", "One call of publish")
        self._published_version = self._gauge("published_version", "The newest version")

    def _sent(self, stats: SyncStats) -> None:
        self._syncs[stats.kind].inc()
        self._sync_s.observe(stats.total_s)
        self._compare_s.observe(stats.diff_s)
        self._transfer_s.observe(stats.transfer_s)
        self._commit_s.observe(stats.commit_s)
        for codec, num_bytes in stats.bytes_by_codec.items():
            self._bytes[codec].inc(num_bytes)
        self._dense_bytes.inc(stats.dense_bytes)
        if stats.kind == "delta":
            self._changed.inc(stats.nnz)
            self._density.set(stats.density)
        _inc(self._joined_bytes, stats.joined_bytes)
        _inc(self._joins, stats.joined)
        _inc(self._full_syncs, stats.full_synced)
        _inc(self._retries, stats.attempts - 1)
        _inc(self._warnings, len(stats.warnings))
        self._count_lost(stats.lost)
        self._version.set(stats.version)
        self._num_receivers.set(stats.receivers)
        self._sender_bytes.set(stats.sender_bytes)
        self._snapshot_bytes.set(stats.snapshot_bytes)
        self._synced_at.set(stats.ended_at)
        labels = self._engines.labels(stats.engines)
        for label in labels:
            self._engine_version[label].set(stats.version)
            self._away_since.pop(label, None)
        for label in set(self._engine_version) - labels:
            if stats.ended_at - self._away_since.setdefault(label, stats.ended_at) >= _AWAY_S:
                self._forget_engine(label)

    def _forget_engine(self, label: str) -> None:
        del self._away_since[label]
        self._engine_version.pop(label).set(nan)  # files of several processes keep the label
        if ValueClass is MutexValue:
            self._engine_version.family.remove(label)

    def _received(self, stats: ReceiveStats) -> None:
        label = self._mark(stats.name, is_dirty=False)
        self._held[label].set(stats.version)
        self._receives[stats.kind].inc()
        if stats.kind == "joined":
            return
        self._stage_s.observe(stats.stage_s)
        self._write_s.observe(stats.commit_s)
        self._pause_s.observe(stats.pause_s)
        self._received_bytes.inc(stats.num_bytes)
        self._staged_bytes.set(stats.staged_bytes)
        _inc(self._in_place, int(stats.is_in_place))

    def _receive_failed(self, event: SyncFailed) -> None:
        self._mark(event.name, is_dirty=event.is_dirty)
        self._receive_failures[_error(event.error)].inc()
        _inc(self._scrubs, int(bool(event.corrupted)))

    def _mark(self, name: str, *, is_dirty: bool) -> str:
        """Note whether a receiver is dirty, and show it. Returns its label."""
        is_new = name not in self._receivers
        (label,) = self._receivers.labels((name,))
        names = self._dirty_names[label]
        if is_new:  # a new generated name is that of a receiver that has reconnected
            names -= {one for one in tuple(names) if _lasting(one) == _lasting(name)}
        (names.add if is_dirty else names.discard)(name)
        shown = None
        while shown != bool(names):  # another thread may have noted something meanwhile
            shown = bool(names)
            self._dirty[label].set(shown)
        return label

    def _published(self, stats: PublishStats) -> None:
        self._publishes[stats.kind].inc()
        self._publish_s.observe(stats.total_s)
        put = (stats.delta_bytes, stats.anchor_bytes)
        for what, num_bytes in zip(_PUT, put, strict=True):
            _inc(self._published_bytes[what], num_bytes)
        self._published_version.set(stats.version)
        _inc(self._warnings, len(stats.warnings))

    def _count_lost(self, lost: Mapping[str, str]) -> None:
        for why in lost.values():
            self._lost[reason_class(why)].inc()

    def _counter(self, name: str, text: str) -> Counter:
        return self._kept(Counter(f"deltasync_{name}", text, registry=self._registry))

    def _counters(self, name: str, text: str, label: str, *known: str) -> _By[Counter]:
        """Labels that are `known` begin at 0, or Prometheus would see no increase in the first."""
        family = Counter(f"deltasync_{name}", text, (label,), registry=self._registry)
        counters = _By(self._kept(family))
        for value in known:
            counters[value].inc(0)
        return counters

    def _kinds(self, name: str, text: str, *kinds: str) -> _By[Counter]:
        return self._counters(name, text, "kind", *kinds)

    def _errors(self, name: str, text: str, label: str = "error") -> _By[Counter]:
        return self._counters(name, text, label, *_LIKELY)

    def _gauge(self, name: str, text: str) -> Gauge:
        name, registry = f"deltasync_{name}", self._registry
        return self._kept(_Gauge(name, text, registry=registry, multiprocess_mode="livemostrecent"))

    def _gauges(
        self,
        name: str,
        text: str,
        label: str,
        mode: Literal["livemostrecent", "livemax"] = "livemostrecent",
    ) -> _By[Gauge]:
        name, registry = f"deltasync_{name}", self._registry
        family = Gauge(name, text, (label,), registry=registry, multiprocess_mode=mode)
        return _By(self._kept(family))

    def _histogram(self, name: str, text: str) -> Histogram:
        name, registry = f"deltasync_{name}_seconds", self._registry
        return self._kept(Histogram(name, text, registry=registry, buckets=SECONDS))

    def _kept(self, metric: _M) -> _M:
        self._registered.append(metric)
        return metric


class _Gauge(Gauge):
    """A gauge without labels that has no value before it is set: 0 would be one."""

    _is_shown = False

    def set(self, value: float) -> None:
        super().set(value)
        self._is_shown = True

    def collect(self) -> Iterable[Metric]:
        return super().collect() if self._is_shown else self.describe()


class _By(dict[str, _M]):
    """The children of a metric with one label, made when they are first asked for."""

    def __init__(self, metric: _M) -> None:
        super().__init__()
        self.family = metric
        self._labels: Callable[[str], _M] = metric.labels

    def __missing__(self, label: str) -> _M:
        child = self[label] = self._labels(label)
        return child


class _Names:
    """Names as label values: at most so many different ones, in order of appearance.

    The part of a name that is generated at each connect is left out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}  # label by name

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def labels(self, names: Iterable[str]) -> set[str]:
        return {self._known.get(name) or self._label(name) for name in names}

    def _label(self, name: str) -> str:
        label = _lasting(name)
        known = set(self._known.values())
        if label not in known and len(known - {OTHER}) >= self._most:
            label = OTHER
        if len(self._known) >= 16 * self._most:  # generated names come and go
            self._known = {one: one for one in known}
        self._known[name] = label
        return label


def _lasting(name: str) -> str:
    """What stays of a name when the same end connects again."""
    return _GENERATED.sub(r"\1", name)


def reason_class(why: str) -> str:
    """The type of error that a text of `SyncStats.lost` begins with, if there is such a type."""
    name = why.partition(":")[0]
    return name if name in _ERRORS else OTHER


def _error(error: BaseException) -> str:
    name = type(error).__name__
    return name if name in _ERRORS else OTHER


def _inc(counter: Counter, amount: int) -> None:
    if amount:
        counter.inc(amount)
