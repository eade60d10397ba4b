"""A model as an engine serves it, quantized: the trainer's source, and a module that holds it."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.gpu.geometry import submodule
from deltasync import ModuleSource
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.served import ServedSource, served_weights

_BLOCK_FP8 = BlockFp8()
_KEPT = ("embed_tokens", "lm_head", "norm", ".gate.")  # in the trainer's dtype, as in checkpoints


def forms(name: str, shape: tuple[int, ...], form: Form = _BLOCK_FP8) -> Form | None:
    """A form for what Qwen3's FP8 checkpoints quantize, and for what has whole groups of it."""
    if len(shape) != 2 or any(kept in name for kept in _KEPT):
        return None
    has_groups = form.cols is None or not shape[1] % form.cols or isinstance(form, BlockFp8)
    return form if has_groups else None


def served_source(module: nn.Module, form: Form = _BLOCK_FP8) -> ServedSource:
    """What a trainer sends of a module."""
    return ServedSource(ModuleSource(module), partial(forms, form=form))


def served_module(module: nn.Module) -> nn.Module:
    """A module with the served tensors of `module`, in memory of their own."""
    root = nn.Module()
    for name, tensor in served_weights(module.state_dict().items(), forms):
        path, _, leaf = name.rpartition(".")
        held = nn.Parameter(tensor.clone(), requires_grad=False)
        submodule(root, path).register_parameter(leaf, held)
    return root
