"""What a sender notices over many deltas: parameters that stay as they are, densities that jump."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.backend import Delta
from deltasync.delta.digests import Ints
from deltasync.sync.options import SenderOptions
from deltasync.sync.source.layout import SentLayout
from deltasync.sync.source.weights import Weights
from deltasync.wire.messages import ParameterSpec

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?P<layer>.*?\.\d+)\.")
_NAMED = 3  # parameters that a warning names
_REMEMBERED, _LEAST = 50, 8  # densities that are compared with, and from how many on


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the first number, or to the last dot."""
    found = _LAYER.match(name)
    return found["layer"] if found else name.rpartition(".")[0] or name


@dataclass(frozen=True, slots=True)
class Noticed:
    """What is noticed of one delta. Attributes as of `SyncStats`."""

    density_by: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class DeltaWatch:
    """Looks at each delta of one sender that was decided.

    Costs a few numpy calls for each delta, whatever the number of parameters.
    """

    def __init__(self) -> None:
        self._specs: Sequence[ParameterSpec] = ()
        self._groups: tuple[str, list[str], Ints, NDArray[np.float64]] | None = None
        self._deltas = 0  # in which something has changed
        self._changed_in: Ints = np.zeros(0, np.int64)  # the last of these, by parameter
        self._is_named = np.zeros(0, np.bool_)
        self._densities: deque[float] = deque(maxlen=_REMEMBERED)
        self._is_high = False

    def look(
        self, weights: Weights, delta: Delta | None, options: SenderOptions, *, version: int
    ) -> Noticed:
        """Look at what was sent, and log what an operator should know.

        Args:
            weights: Whose delta it is.
            delta: What was sent, all of it; None for a full sync.
            options: What to report, and when to warn.
            version: What it has brought.
        """
        layout = weights.layout
        if delta is None or layout is None:
            return Noticed()
        self._fit(layout.specs)
        warnings = tuple(filter(None, self._warnings(weights, layout, delta, options)))
        for text in warnings:
            logger.warning("v%d: %s", version, text)
        return Noticed(self._densities_by(delta, options.report_density), warnings)

    def _warnings(
        self, weights: Weights, layout: SentLayout, delta: Delta, options: SenderOptions
    ) -> Iterator[str]:
        if delta.nnz:
            limit = options.warn_unchanged_syncs if weights.knows_trained else None
            yield self._unchanged(weights.trained, delta.changed, limit)
            yield self._jump(delta.nnz / layout.numel, options.warn_density_factor)

    def _densities_by(
        self, delta: Delta, kind: Literal["layer", "parameter"] | None
    ) -> dict[str, float]:
        """Shares that changed, by layer or parameter."""
        if kind is None:
            return {}
        if self._groups is None or self._groups[0] != kind:
            self._groups = _groups(self._specs, kind)
        _, names, group, numel = self._groups
        counts = np.bincount(group[delta.changed], delta.counts(), len(names))
        return dict(zip(names, (counts / numel).tolist(), strict=True))

    def _fit(self, specs: Sequence[ParameterSpec]) -> None:
        """Start over if this is another model."""
        if specs is self._specs:
            return
        if [spec.names for spec in specs] != [spec.names for spec in self._specs]:
            self._deltas, self._changed_in = 0, np.zeros(len(specs), np.int64)
            self._is_named = np.zeros(len(specs), np.bool_)
            self._densities.clear()
            self._is_high = False
        self._specs, self._groups = specs, None

    def _unchanged(self, trained: NDArray[np.bool_], changed: Ints, limit: int | None) -> str:
        """Which trained parameters have not changed in so many deltas; each is named once."""
        self._deltas += 1
        self._changed_in[changed] = self._deltas
        if limit is None or self._deltas < limit:
            return ""
        is_new = (self._changed_in <= self._deltas - limit) & trained & ~self._is_named
        if not is_new.any():
            return ""
        self._is_named |= is_new
        numbers = np.flatnonzero(is_new)
        names = ", ".join(repr(self._specs[number].name) for number in numbers[:_NAMED].tolist())
        more = "" if len(numbers) <= _NAMED else f" and {len(numbers) - _NAMED} more"
        return (
            f"{names}{more} require grad and have not changed in {limit} deltas: check that the "
            "optimizer has them, and that its steps are not too small for the dtype that is sent"
        )

    def _jump(self, density: float, factor: float | None) -> str:
        """Say that a density is far above those before, once until it is back."""
        usual = median(self._densities) if len(self._densities) >= _LEAST else None
        self._densities.append(density)
        was_high = self._is_high
        self._is_high = factor is not None and usual is not None and density > factor * usual
        if not self._is_high or was_high:
            return ""
        return (
            f"{density:.3%} of the elements changed, the median of the deltas before is "
            f"{usual:.3%}: check the learning rate, and whether something loaded other weights"
        )


def _groups(
    specs: Sequence[ParameterSpec], kind: str
) -> tuple[str, list[str], Ints, NDArray[np.float64]]:
    """(kind, names, int64[parameters] group of each, float64[groups] elements, at least 1)."""
    names = [layer_of(spec.name) if kind == "layer" else spec.name for spec in specs]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    group = np.array([order[name] for name in names], np.int64)
    numel = np.bincount(group, [spec.numel for spec in specs], len(order))
    return kind, list(order), group, np.maximum(numel, 1)
