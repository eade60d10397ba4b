"""vLLM on CPUs, for tests: plugins that each of its processes loads, if VLLM_PLUGINS names them."""

from __future__ import annotations


def without_tiles() -> None:
    """Some virtual machines say that they have tiles, and fail to use them."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def without_packing() -> None:
    """Matrices stay where they were loaded, as they do on GPUs."""
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False
