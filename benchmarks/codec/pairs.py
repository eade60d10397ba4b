"""Two versions of a model between which an optimizer took k steps, as bfloat16 and as served."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from benchmarks.codec.training import SIZES, Training, Weights
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.served import served_weights

BFLOAT16 = "bfloat16"
FORMS: dict[str, Form] = {
    "block-fp8": BlockFp8(),
    "nvfp4": CompressedNvfp4(),
    "int4": Int4(32),
}
"""By name: forms that engines serve the matrices of a model's blocks in."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training: its learning rate, and the steps of its pairs.

    `served`: the steps of the pairs that are also made in each of FORMS.
    """

    lr: float
    steps: tuple[int, ...]
    served: tuple[int, ...] = ()


RUNS: dict[str, tuple[Run, ...]] = {
    "full": (
        Run(1e-7, (1, 8)),
        Run(3e-7, (1, 8)),
        Run(1e-6, (1, 2, 4, 8, 16, 32), served=(8,)),
        Run(3e-6, (1, 8)),
        Run(1e-5, (1, 8), served=(8,)),
        Run(1e-4, (1, 8)),
    ),
    "quick": (Run(1e-6, (1, 8), served=(8,)), Run(3e-6, (1,)), Run(1e-5, (1, 8))),
    "tiny": (Run(1e-4, (1,), served=(1,)),),
}


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two versions of the same tensors.

    Attributes:
        name: Such as "masters-1e-6-k1" and "masters-1e-5-k8-int4": what the optimizer keeps, its
            learning rate, steps between the two, and the form in which the tensors are served.
        old, new: Tensors by name; not to be written.
    """

    name: str
    old: Weights
    new: Weights


def name_of(lr: float, steps: int, form: str) -> str:
    """The name of a pair."""
    name = f"masters-{rate(lr)}-k{steps}"
    return name if form == BFLOAT16 else f"{name}-{form}"


def rate(lr: float) -> str:
    """1e-06 as 1e-6."""
    return f"{lr:.0e}".replace("e-0", "e-")


def pairs(scale: str, only: Collection[str] = ()) -> Iterator[Pair]:
    """The pairs of a scale, or those named in `only`. On one machine they are always the same."""
    training = Training(SIZES[scale])
    for run in RUNS[scale]:
        wanted = [one for one in _planned(run) if not only or name_of(run.lr, *one) in only]
        if not wanted:
            continue
        versions = training.versions(run.lr, max(steps for steps, _ in wanted))
        old = next(versions)
        for step, new in enumerate(versions, start=1):
            for steps, form in wanted:
                if steps == step:
                    yield Pair(name_of(run.lr, steps, form), served(old, form), served(new, form))


def names(scale: str) -> list[str]:
    """Of all pairs of a scale, in order."""
    return [name_of(run.lr, *one) for run in RUNS[scale] for one in _planned(run)]


def served(weights: Weights, form: str) -> Weights:
    """The matrices of a model's blocks as they are served; bfloat16 weights as they are."""
    if form == BFLOAT16:
        return weights
    matrices = [
        (name, weight)
        for name, weight in weights.items()
        if weight.dim() == 2 and name.startswith("blocks.")
    ]
    return dict(served_weights(matrices, lambda name, shape: FORMS[form]))


def _planned(run: Run) -> Iterator[tuple[int, str]]:
    """(steps, form) of each pair."""
    for steps in run.steps:
        yield steps, BFLOAT16
        if steps in run.served:
            yield from ((steps, form) for form in FORMS)
