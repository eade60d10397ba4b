"""Two versions of a model between which an optimizer took k steps, as bfloat16 and as served.

`python -m benchmarks.codec.pairs SCALE FOLDER [NAME ...]` writes each of them, or those named, as
`NAME/old.safetensors` and `NAME/new.safetensors`: for `--pairs FOLDER` of the benchmarks, for
`deltasync diff`, and for tests by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from benchmarks.codec.training import SIZES, Training, Weights
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.served import served_weights

Kept = Literal["masters", "resumed", "bf16"]
"""What the optimizer keeps: float32 masters that begin at a bfloat16 checkpoint; such masters in
the middle of a training, anywhere between two bfloat16 numbers; or bfloat16 weights."""
BFLOAT16 = "bfloat16"
_FILES = "old", "new"
FORMS: dict[str, Form] = {
    "block-fp8": BlockFp8(),
    "nvfp4": CompressedNvfp4(),
    "int4": Int4(32),
}
"""By name: forms that engines serve the matrices of a model's blocks in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training: what the optimizer keeps, its learning rate, and the steps of its pairs.

    `served`: the steps of the pairs that are also made in each of FORMS.
    """

    kept: Kept
    lr: float
    steps: tuple[int, ...]
    served: tuple[int, ...] = ()


RUNS: dict[str, tuple[Run, ...]] = {
    "full": (
        Run(kept="masters", lr=1e-7, steps=(1, 8)),
        Run(kept="masters", lr=3e-7, steps=(1, 8)),
        Run(kept="masters", lr=1e-6, steps=(1, 2, 4, 8, 16, 32), served=(8,)),
        Run(kept="masters", lr=3e-6, steps=(1, 8)),
        Run(kept="masters", lr=1e-5, steps=(1, 8), served=(8,)),
        Run(kept="masters", lr=1e-4, steps=(1, 8)),
        Run(kept="resumed", lr=1e-6, steps=(1, 8)),
        Run(kept="resumed", lr=3e-6, steps=(1,)),
        Run(kept="bf16", lr=3e-6, steps=(1, 8)),
    ),
    "quick": (
        Run(kept="masters", lr=1e-6, steps=(1, 8)),
        Run(kept="masters", lr=3e-6, steps=(1,)),
        Run(kept="masters", lr=1e-5, steps=(1, 8), served=(8,)),
        Run(kept="resumed", lr=1e-6, steps=(1,)),
        Run(kept="bf16", lr=3e-6, steps=(1,)),
    ),
    "tiny": (
        Run(kept="masters", lr=1e-6, steps=(1,)),
        Run(kept="masters", lr=1e-4, steps=(1,), served=(1,)),
        Run(kept="resumed", lr=1e-4, steps=(1,)),
        Run(kept="bf16", lr=1e-4, steps=(1,)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Two versions of the same tensors.

    Attributes:
        kept, lr: What the optimizer keeps of a weight, and its learning rate.
        steps: Steps between the two.
        form: BFLOAT16, or the name of the form in which the tensors are served.
        old, new: Tensors by name; not to be written.
    """

    kept: Kept
    lr: float
    steps: int
    form: str
    old: Weights
    new: Weights

    @property
    def name(self) -> str:
        return name_of(self.kept, self.lr, self.steps, self.form)


def name_of(kept: str, lr: float, steps: int, form: str) -> str:
    """Such as "masters-1e-6-k1" and "masters-1e-5-k8-int4"."""
    name = f"{kept}-{rate(lr)}-k{steps}"
    return name if form == BFLOAT16 else f"{name}-{form}"


def rate(lr: float) -> str:
    """1e-06 as 1e-6."""
    return f"{lr:.0e}".replace("e-0", "e-")


def pairs(scale: str, only: Collection[str] = ()) -> Iterator[Pair]:
    """The pairs of a scale, or those named in `only`. On one machine they are always the same."""
    training = Training(SIZES[scale])
    for run in RUNS[scale]:
        wanted = [pair for pair in _planned(run) if not only or name_of(*pair) in only]
        if not wanted:
            continue
        num_steps = max(steps for _, _, steps, _ in wanted)
        start = training.masters if run.kept == "resumed" else training.checkpoint
        dtype = torch.bfloat16 if run.kept == "bf16" else torch.float32
        versions = training.versions(start, run.lr, num_steps, dtype)
        old = next(versions)
        for step, new in enumerate(versions, start=1):
            for kept, lr, steps, form in wanted:
                if steps == step:
                    parts = served(old, form), served(new, form)
                    yield Pair(kept=kept, lr=lr, steps=steps, form=form, old=parts[0], new=parts[1])


def read_pairs(scale: str, folder: Path, only: Collection[str] = ()) -> Iterator[Pair]:
    """The same pairs as `main` has written them to a folder."""
    for run in RUNS[scale]:
        for kept, lr, steps, form in _planned(run):
            name = name_of(kept, lr, steps, form)
            if not only or name in only:
                old, new = (load_file(folder / name / f"{one}.safetensors") for one in _FILES)
                yield Pair(kept=kept, lr=lr, steps=steps, form=form, old=old, new=new)


def names(scale: str) -> list[str]:
    """Of all pairs of a scale, in order."""
    return [name_of(*pair) for run in RUNS[scale] for pair in _planned(run)]


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


def _planned(run: Run) -> Iterator[tuple[Kept, float, int, str]]:
    for steps in run.steps:
        yield run.kept, run.lr, steps, BFLOAT16
        if steps in run.served:
            yield from ((run.kept, run.lr, steps, form) for form in FORMS)


def main(scale: str, folder: str, *only: str) -> None:
    if unknown := set(only) - set(names(scale)):
        sys.exit(f"no such pairs: {sorted(unknown)}; there are {names(scale)}")
    for pair in pairs(scale, only):
        path = Path(folder, pair.name)
        path.mkdir(parents=True, exist_ok=True)
        for name, weights in zip(_FILES, (pair.old, pair.new), strict=True):
            save_file(weights, path / f"{name}.safetensors")
        print(path, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
