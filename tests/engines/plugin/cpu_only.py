"""Engines on CPUs, for tests: plugins of vLLM, which VLLM_PLUGINS names, and one of SGLang."""

from __future__ import annotations

import os
import sys
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


def two_batches() -> None:
    """Let engine cores keep two batches in flight, as asynchronous scheduling does on GPUs.

    Prints how many there were at each update.
    """
    from vllm.config import VllmConfig

    from deltasync.integrations import vllm_core

    end_steps = vllm_core._end_steps

    def noted(core: Any) -> None:
        sys.stdout.write(f"{len(core.batch_queue)} steps in flight\n")
        sys.stdout.flush()
        end_steps(core)

    VllmConfig.max_concurrent_batches = property(lambda _: 2)
    vllm_core._end_steps = noted
