"""A vLLM within the caller's program. Needs vLLM, no pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

SHORT = [{"prompt_token_ids": list(range(3 + n, 20 + n))} for n in range(4)]
LONG = [{"prompt_token_ids": list(range(3 + n, 303 + n))} for n in range(2)]  # blocks of keys


def started(folder: Path, weights: dict[str, Tensor], **settings: Any) -> Any:
    """An engine that was started on these weights."""
    from vllm import LLM

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    default: dict[str, Any] = {
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        weight_transfer_config={"backend": "deltasync"},
        **(default | settings),
    )


def tokens(llm: Any, prompts: list[dict[str, list[int]]] = SHORT) -> list[list[int]]:
    """What the engine makes of them."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, sampling)]
