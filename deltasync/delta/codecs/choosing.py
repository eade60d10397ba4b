"""Which coding takes the least time for a plan on a link: to code, to send and to decode it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from deltasync.delta.backend import Plan
from deltasync.delta.codecs.coding import Coding
from deltasync.delta.options import OptionsModel
from deltasync.wire.codecs import INDEX_ITEM_BYTES

_DENSE_DENSITY = 0.75
"""Share of a dense chunk that is taken to differ, of the half at least that makes it dense."""


class CodingCost(OptionsModel):
    """What one coding costs: nanoseconds of both ends together, beside packing, and bytes.

    Attributes:
        change_ns: For a changed element.
        element_ns: For each element of the model, changed or not.
        share: Bytes sent for each byte of the payload as packed, if everything changes ...
        halving: ... and how much more with each halving of the density.
    """

    change_ns: float
    element_ns: float
    share: float
    halving: float


class CodingCosts(OptionsModel):
    """What codings cost on one kind of machine.

    Attributes:
        machine: Where they were measured, and with what.
        deltas: Of deltas, by coding; those that are not there are not chosen.
        whole: Of full syncs: no old values are known there. Every element counts as a change.
    """

    machine: str
    deltas: Mapping[Coding, CodingCost]
    whole: Mapping[Coding, CodingCost]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be sent.

    Attributes:
        changes: Elements that differ, about: of dense chunks it is not known.
        numel: Elements of the model.
        raw_bytes: Indices and values, as they are packed.
        sparse_bytes: What they would take if all chunks were sparse: what codings are shares of.
        is_full: Whether it is a full sync.
    """

    changes: float
    numel: int
    raw_bytes: int
    sparse_bytes: float
    is_full: bool

    @classmethod
    def of(cls, plan: Plan, numel: int, num_bytes: int) -> Self:
        """That of a plan, for a model of so many elements and bytes."""
        raw_bytes, is_full = plan.sparse_bytes + plan.dense_bytes, plan.base_version is None
        each = num_bytes / max(numel, 1)
        dense = plan.dense_bytes / max(each, 1)
        if is_full:
            return cls(dense, numel, raw_bytes, raw_bytes, is_full)
        changes = plan.sparse_bytes / (INDEX_ITEM_BYTES + each) + _DENSE_DENSITY * dense
        return cls(changes, numel, raw_bytes, changes * (INDEX_ITEM_BYTES + each), is_full)


def predicted_s(coding: Coding, work: Work, bytes_per_s: float, costs: CodingCosts) -> float:
    """Seconds to code, send and decode. `bytes_per_s` is that of the link."""
    return coding_s(coding, work, costs) + sent_bytes(coding, work, costs) / bytes_per_s


def coding_s(coding: Coding, work: Work, costs: CodingCosts) -> float:
    """Seconds of both ends together."""
    cost = _cost(coding, work, costs)
    return 1e-9 * (cost.change_ns * work.changes + cost.element_ns * work.numel)


def sent_bytes(coding: Coding, work: Work, costs: CodingCosts) -> float:
    """Bytes that are sent; never more than are packed."""
    if coding == "none" or not work.changes:
        return work.raw_bytes
    cost = _cost(coding, work, costs)
    halvings = math.log2(max(work.numel / work.changes, 1.0))
    return min(work.raw_bytes, work.sparse_bytes * (cost.share + cost.halving * halvings))


def cheapest(work: Work, bytes_per_s: float, costs: CodingCosts) -> Coding:
    """The coding of the least predicted time; of those that take the same, that of fewer bytes."""
    known = costs.whole if work.is_full else costs.deltas
    return min(
        known,
        key=lambda coding: (
            predicted_s(coding, work, bytes_per_s, costs),
            sent_bytes(coding, work, costs),
        ),
    )


def costs_on(device_type: str) -> CodingCosts:
    """Those of weights on such a device; of one that was not measured, those of "cpu"."""
    return CODING_COSTS.get(device_type, CODING_COSTS["cpu"])


def _costs(change_ns: float, element_ns: float, share: float, halving: float) -> CodingCost:
    return CodingCost(change_ns=change_ns, element_ns=element_ns, share=share, halving=halving)


def _cost(coding: Coding, work: Work, costs: CodingCosts) -> CodingCost:
    return (costs.whole if work.is_full else costs.deltas)[coding]


# Of hosts, which code what has no kernels, wherever weights live.
_DELTAS: Mapping[Coding, CodingCost] = {
    "none": _costs(0.0, 0.0, 1.0, 0.0),
    "zstd": _costs(12.5, 0.00122, 0.697, 0.0179),
    "gap": _costs(22.0, 0.197, 0.0992, 0.0193),
    "block": _costs(97.4, 0.299, 0.154, 0.0156),
    "class": _costs(190.0, 4.64, 0.0789, 0.00304),
}
_WHOLE: Mapping[Coding, CodingCost] = {
    "none": _costs(0.0, 0.0, 1.0, 0.0),
    "zstd": _costs(3.75, 0.0, 0.778, 0.0),
}

CODING_COSTS: Mapping[str, CodingCosts] = MappingProxyType(
    {
        "cpu": CodingCosts(
            machine="AMD EPYC, 2 cores, AVX512; Python 3.11.7, torch 2.13.0+cpu, numpy 2.4.6; "
            "commit 14de74679559, 2026-11-26.",
            deltas=_DELTAS,
            whole=_WHOLE,
        ),
        "cuda": CodingCosts(
            machine="2 x NVIDIA H100 80GB HBM3; Intel(R) Xeon(R) Processor, 32 cores, AVX512; "
            "Python 3.12.3, torch 2.11.0+cu130, numpy 2.5.2; commit bef3dc46593c, 2026-11-25.",
            deltas={
                **_DELTAS,
                "block": _costs(0.111, 0.00329, 0.154, 0.0156),
                "class": _costs(2.82, 0.0163, 0.0789, 0.00304),
            },
            whole=_WHOLE,
        ),
    }
)
"""By type of the device that weights live on; `python -m benchmarks codec-costs` measures them, and
with `--gpu` those of "cuda", for both ends on GPUs."""
