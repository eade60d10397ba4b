"""A model as an engine serves it, quantized: the trainer's source, and a module that holds it."""

from __future__ import annotations

from torch import nn

from benchmarks.syncs.geometry import submodule
from deltasync import ModuleSource
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.served import ServedSource, served_weights

_BLOCK_FP8 = BlockFp8()
_KEPT = ("embed_tokens", "lm_head", "norm", ".gate.")  # in the trainer's dtype, as in checkpoints


def forms(name: str, shape: tuple[int, ...]) -> Form | None:
    """Block FP8 for what Qwen3's FP8 checkpoints quantize."""
    return None if len(shape) != 2 or any(kept in name for kept in _KEPT) else _BLOCK_FP8


def served_source(module: nn.Module) -> ServedSource:
    """What a trainer sends of a module."""
    return ServedSource(ModuleSource(module), forms)


def served_module(module: nn.Module) -> nn.Module:
    """A module with the served tensors of `module`, in memory of their own."""
    root = nn.Module()
    for name, tensor in served_weights(module.state_dict().items(), forms):
        path, _, leaf = name.rpartition(".")
        held = nn.Parameter(tensor.clone(), requires_grad=False)
        submodule(root, path).register_parameter(leaf, held)
    return root
