"""A LoRA adapter, as PEFT writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_RANK = 8
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NAME = "adapter"


def write(folder: Path) -> None:
    """Random matrices for the attention of the checkpoint in the folder."""
    (folder / _NAME).mkdir(exist_ok=True)
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    config |= {"r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": _TARGETS}
    (folder / _NAME / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator, found = torch.Generator().manual_seed(5), dict[str, Tensor]()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 no mapping
            path = name.removesuffix(".weight")
            if path.endswith(_TARGETS):
                rows, columns = file.get_slice(name).get_shape()
                for part, shape in (("A", (_RANK, columns)), ("B", (rows, _RANK))):
                    matrix = (torch.randn(shape, generator=generator) * 0.2).bfloat16()
                    found[f"base_model.model.{path}.lora_{part}.weight"] = matrix
    save_file(found, folder / _NAME / "adapter_model.safetensors")


def request(folder: Path) -> Any:
    """What a request names the adapter with."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, 1, str(folder / _NAME))
