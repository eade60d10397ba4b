"""Each of two ranks trains twice alike, with and without overlapped gathering, and exports.

torchrun --nproc-per-node 2 -m tests.megatron.pretend tests/megatron/gathering.py FOLDER

Prints, for each step, SHA-256 of what is exported: when step() has gathered itself, when nothing
has gathered, and twice when the recipe has.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 3
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "megatron_bridge.py"


def recipe() -> Any:
    spec = spec_from_file_location("recipe", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sha256(weights: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in weights:
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def note(mode: str, step: int, weights: Any) -> None:
    sys.stdout.write(f"rank {dist.get_rank()} {mode} {step} {sha256(weights)}\n")
    sys.stdout.flush()


def trained(ours: Any, folder: str, *, overlaps: bool, syncs: bool) -> None:
    """Note what is exported after each step. `syncs`: by the recipe, else as it lies there."""
    torch.manual_seed(0)
    bridge, model, optimizer = ours.made(folder, overlaps=overlaps)
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())  # ranks see other data
        ours.step(model, optimizer)
        if not syncs:
            lies = bridge.export_hf_weights(model, cpu=False, show_progress=False)
            note("stale" if overlaps else "truth", step, lies)
        else:
            note("recipe", step, ours.export(bridge, model))
            note("again", step, ours.export(bridge, model))


if __name__ == "__main__":
    ours = recipe()
    trained(ours, sys.argv[1], overlaps=False, syncs=False)
    trained(ours, sys.argv[1], overlaps=True, syncs=False)
    trained(ours, sys.argv[1], overlaps=True, syncs=True)
    dist.destroy_process_group()
