"""Small models that draft what a Llama says: what vLLM is told of them, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engines.checkpoints import checkpoint, save, write_config


def of_its_own(folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """A smaller model of the same kind."""
    del weights
    draft = write_config("LlamaForCausalLM", folder, {"num_hidden_layers": 1})
    save(draft, {name: tensor * 0.05 for name, tensor in checkpoint(draft, 7).items()})
    return {"method": "draft_model", "model": str(draft)}


def eagle(folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """One layer over the model's hidden states; embeddings and head are the model's own."""
    write_config("LlamaForCausalLM", folder, {"num_hidden_layers": 1})
    layer = {
        name.removeprefix("model."): tensor.flip(0)
        for name, tensor in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    hidden = weights["model.norm.weight"].numel()
    joined = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(5)) * 0.05
    save(folder, layer | {"fc.weight": joined.bfloat16()})
    return {"method": "eagle", "model": str(folder)}


DRAFTS = {"a model": of_its_own, "EAGLE": eagle}
"""By what a case calls them."""
