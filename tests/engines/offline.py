"""A vLLM within the caller's program. Needs vLLM, no pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engines.checkpoints import save

SHORT = [{"prompt_token_ids": list(range(3 + n, 20 + n))} for n in range(4)]


def started(folder: Path, weights: dict[str, Tensor], **settings: Any) -> Any:
    """An engine that was started on these weights."""
    from vllm import LLM

    save(folder, weights)
    return LLM(model=str(folder), **engine_settings(settings))


def engine_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Those, and what an engine of a small model is started with otherwise."""
    default: dict[str, Any] = {
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "weight_transfer_config": {"backend": "deltasync"},
    }
    return default | settings


def tokens(llm: Any, prompts: list[dict[str, list[int]]] = SHORT) -> list[list[int]]:
    """What the engine makes of them: some tokens of each."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, sampling)]


def stop(llm: Any) -> None:
    """End its processes."""
    llm.llm_engine.engine_core.shutdown()


def bits_in(worker: Any) -> dict[str, bytes]:
    """Of a rank's parameters."""
    named = worker.get_model().named_parameters()
    return {n: p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for n, p in named}
