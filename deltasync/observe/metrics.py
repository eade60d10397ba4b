"""Prometheus metrics of syncs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric

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

_MOST_NAMES = 64
_ERRORS = {
    *(n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)),
    *("Detached", "MemoryError", "OSError", "OutOfMemoryError", "RuntimeError", OTHER),
}
"""The labels of errors. Each begins at 0, or Prometheus would see no increase in the first."""
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

    Raises:
        ConfigError: The registry has metrics of these names already, or PROMETHEUS_MULTIPROC_DIR
            cannot be written.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = REGISTRY if registry is None else registry
        self._engines, self._receivers = _Names(), _Names()
        try:
            self._make_sender()
            self._make_receiver()
            self._make_publisher()
        except OSError as error:
            raise ConfigError(f"PROMETHEUS_MULTIPROC_DIR cannot be written: {error}") from error
        except ValueError as error:
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
            case SyncFailed():
                self._failed(event)

    def _make_sender(self) -> None:
        roles, text = ("sender", "receiver", "publisher"), "Syncs and versions that failed"
        self._failures = self._counter("failures", text, role=roles, error=_ERRORS)
        self._syncs = self._counter("syncs", "Syncs that receivers took", kind=("delta", "full"))
        self._sync_s = self._histogram("sync", "One call of send_weights")
        self._commit_s = self._histogram("commit", "Decision until all receivers committed: pause")
        self._bytes = self._counter("payload_bytes", "Bytes sent to each receiver", codec=())
        self._density = self._gauge("density_ratio", "Share of elements changed, last delta")
        self._full_syncs = self._counter("full_syncs", "Receivers that needed a full sync")
        self._lost = self._counter("lost_receivers", "Receivers that left", reason=_ERRORS)
        self._warnings = self._counter("warnings", "Warnings of the sender")
        self._version = self._gauge("version", "The last version decided")
        self._num_receivers = self._gauge("receivers", "Receivers that hold the last version")
        self._engine_version = self._gauge("engine_version", "Version held last", "engine")
        self._synced_at = self._gauge("last_sync_timestamp_seconds", "When the last sync ended")

    def _make_receiver(self) -> None:
        kinds = ("delta", "full", "joined")
        self._receives = self._counter("receiver_syncs", "Syncs received", kind=kinds)
        self._stage_s = self._histogram("receiver_stage", "Receiving and staging; engine serves")
        self._pause_s = self._histogram("receiver_pause", "The pause of the engine")
        self._received_bytes = self._counter("receiver_bytes", "Indices and values received")
        self._scrubs = self._counter("receiver_scrub_findings", "Scrubs that found corruption")
        self._receiver_version = self._gauge("receiver_version", "The version held", "receiver")
        text = "1 while it must not serve"
        self._dirty = self._gauge("receiver_dirty", text, "receiver", mode="livemax")

    def _make_publisher(self) -> None:
        objects = ("delta", "anchor")
        self._published_bytes = self._counter("published_bytes", "Bytes written", object=objects)
        self._published_version = self._gauge("published_version", "The newest version")

    def _sent(self, stats: SyncStats) -> None:
        self._syncs.labels(stats.kind).inc()
        self._sync_s.observe(stats.total_s)
        self._commit_s.observe(stats.commit_s)
        for codec, num_bytes in stats.bytes_by_codec.items():
            self._bytes.labels(codec).inc(num_bytes)
        if stats.kind == "delta":
            self._density.set(stats.density)
        self._full_syncs.inc(stats.full_synced)
        self._warnings.inc(len(stats.warnings))
        self._count_lost(stats.lost)
        self._version.set(stats.version)
        self._num_receivers.set(stats.receivers)
        self._synced_at.set(stats.ended_at)
        for name in stats.engines:
            self._engine_version.labels(self._engines.label(name)).set(stats.version)

    def _received(self, stats: ReceiveStats) -> None:
        label = self._receivers.label(stats.name)
        self._dirty.labels(label).set(0)
        self._receiver_version.labels(label).set(stats.version)
        self._receives.labels(stats.kind).inc()
        if stats.kind == "joined":
            return
        self._stage_s.observe(stats.stage_s)
        self._pause_s.observe(stats.pause_s)
        self._received_bytes.inc(stats.num_bytes)

    def _failed(self, event: SyncFailed) -> None:
        self._failures.labels(event.role, _error(type(event.error).__name__)).inc()
        self._count_lost(event.lost)
        if event.receivers is not None:
            self._num_receivers.set(event.receivers)
        if event.role == "receiver":
            self._dirty.labels(self._receivers.label(event.name)).set(event.is_dirty)
            self._scrubs.inc(bool(event.corrupted))

    def _published(self, stats: PublishStats) -> None:
        self._published_bytes.labels("delta").inc(stats.delta_bytes)
        self._published_bytes.labels("anchor").inc(stats.anchor_bytes)
        self._published_version.set(stats.version)
        self._warnings.inc(len(stats.warnings))

    def _count_lost(self, lost: Mapping[str, str]) -> None:
        for why in lost.values():
            self._lost.labels(_error(why.partition(":")[0])).inc()

    def _counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        """Those values of labels begin at 0, as `_ERRORS` do."""
        family = Counter(f"deltasync_{name}", text, tuple(labels), registry=self._registry)
        for values in product(*labels.values()) if labels else ():
            family.labels(*values)
        return family

    def _gauge(
        self,
        name: str,
        text: str,
        *labels: str,
        mode: Literal["livemostrecent", "livemax"] = "livemostrecent",
    ) -> Gauge:
        kind = Gauge if labels else _Gauge
        name, registry = f"deltasync_{name}", self._registry
        return kind(name, text, labels, registry=registry, multiprocess_mode=mode)

    def _histogram(self, name: str, text: str) -> Histogram:
        name, registry = f"deltasync_{name}_seconds", self._registry
        return Histogram(name, text, registry=registry, buckets=SECONDS)


class _Gauge(Gauge):
    """A gauge without labels that has no value before it is set: 0 would be one."""

    _is_shown = False

    def set(self, value: float) -> None:
        super().set(value)
        self._is_shown = True

    def collect(self) -> Iterable[Metric]:
        return super().collect() if self._is_shown else self.describe()


class _Names:
    """Names as label values, without the part that is generated at each connect.

    The first `_MOST_NAMES` have a label of their own.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        name = _GENERATED.sub(r"\1", name)
        if name not in self._known and len(self._known) >= _MOST_NAMES:
            return OTHER
        self._known.add(name)
        return name


def _error(name: str) -> str:
    """The label of a type of error."""
    return name if name in _ERRORS else OTHER
