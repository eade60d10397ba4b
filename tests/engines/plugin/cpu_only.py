"""Engines on CPUs, for tests: plugins of vLLM, which VLLM_PLUGINS names, and one of SGLang."""

from __future__ import annotations

import os
from typing import Any


def without_tiles() -> None:
    """Some virtual machines say that they have tiles, and fail to use them."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def without_packing() -> None:
    """Matrices stay where they were loaded, as they do on GPUs."""
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def processed_once() -> None:
    """SGLang's matrices bear to be worked on after loading once, as those of packed formats do."""
    if "TESTED_PROCESSING" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def process(original: Any, method: Any, layer: Any) -> None:
        if getattr(layer, "is_processed", False):
            layer.weight.data.neg_()
        layer.is_processed = True
        original(method, layer)

    method = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"
    HookRegistry.register(f"{method}.process_weights_after_loading", process, HookType.AROUND)
