"""Events as flat dictionaries of floats, for W&B, TensorBoard and the like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from deltasync.errors import DeltaSyncError
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, SyncEvent, SyncFailed
from deltasync.sync.stats import SyncStats

_NO_NUMBERS = {"digest", "ended_at", "phases"}
_UNSAFE = re.compile(r"[^\w./-]+", re.ASCII)  # what TensorBoard replaces in tags


def flat(event: SyncEvent | DeltaSyncError, *, prefix: str = "deltasync/") -> dict[str, float]:
    """Return the numbers of an event by name: `wandb.log(flat(stats), step=...)`.

    Names are `prefix` and those of the fields, such as "deltasync/commit_s"; what a dictionary has
    comes below, such as "deltasync/bytes_by_codec/gap". Other than word characters, ".", "/" and
    "-" become "_". `lost` and `warnings` are counted. "deltasync/failed" is 1.0 for a failure, else
    0.0. Seconds and bytes as in the fields.

    Args:
        event: What a listener gets, or the callback of `sync_after_step`.
        prefix: What all names begin with.
    """
    found = {"failed": float(isinstance(event, SyncFailed | DeltaSyncError))}
    if isinstance(event, SyncStats | PublishStats):
        found["density"] = event.density
    if isinstance(event, SyncStats | PublishStats | ReceiveStats):
        found |= _numbers(event)
    if isinstance(event, SyncFailed):
        found |= {"lost": float(len(event.lost)), "total_s": event.total_s}
    return {prefix + _UNSAFE.sub("_", name): number for name, number in found.items()}


def _numbers(event: SyncStats | PublishStats | ReceiveStats) -> Iterator[tuple[str, float]]:
    for field in fields(event):
        name, value = field.name, getattr(event, field.name)
        if name in _NO_NUMBERS or isinstance(value, str):
            continue
        if name in ("lost", "warnings", "engines"):
            yield name, float(len(value))
        elif isinstance(value, int | float):
            yield name, float(value)
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{key}", float(each)) for key, each in value.items())
