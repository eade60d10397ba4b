"""What is tried of real engines on GPUs, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deltasync.quant.config import forms_of_config
from deltasync.quant.served import Forms
from tests.engines.quantized import CONFIGS

_GRAPHS: dict[str, Any] = {"enforce_eager": False}
# The sizes for which there are kernels of latent attention.
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine, and how it is started.

    Attributes:
        architecture: Key of `checkpoints.CONFIGS`.
        setup: How it runs, in a few words: a column of the table.
        config: Added to the checkpoint's configuration.
        settings: Of vLLM's LLM.
        workers: GPUs that it takes.
        form: Key of `quantized.CONFIGS`, for engines that are started on quantized checkpoints.
    """

    architecture: str
    setup: str = "eager"
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    form: str = ""

    @property
    def forms(self) -> Forms:
        """What trainers make of its `quantization_config`."""
        return forms_of_config(CONFIGS[self.form])


_TWO: dict[str, Any] = {"distributed_executor_backend": "mp"}
_ALL = [
    *(
        Case(architecture=architecture)
        for architecture in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "MixtralForCausalLM",
            "Gemma2ForCausalLM",
            "Phi3ForCausalLM",
        )
    ),
    Case(architecture="DeepseekV2ForCausalLM", config=_LATENT),
    Case(architecture="DeepseekV3ForCausalLM", config=_LATENT),
    Case(architecture="LlamaForCausalLM", setup="CUDA graphs", settings=_GRAPHS),
    Case(architecture="Qwen3MoeForCausalLM", setup="CUDA graphs", settings=_GRAPHS),
    Case(
        architecture="DeepseekV2ForCausalLM", setup="CUDA graphs", settings=_GRAPHS, config=_LATENT
    ),
    Case(architecture="LlamaForCausalLM", setup="LoRA", settings={"enable_lora": True}),
    *(
        Case(architecture=architecture, setup=form, form=form, settings=_GRAPHS)
        for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
        for form in ("block FP8", "channel FP8", "channel INT8", "MXFP8", "NVFP4", "INT4")
    ),
    *(
        Case(architecture=architecture, setup=setup, settings=_TWO | settings, workers=2)
        for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
        for setup, settings in (
            ("TP 2", {"tensor_parallel_size": 2}),
            ("TP 2, EP 2", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
            ("PP 2", {"pipeline_parallel_size": 2}),
        )
        if "EP" not in setup or "Moe" in architecture
    ),
]
CASES = {f"{case.architecture}/{case.setup}": case for case in _ALL}
"""By name: the architecture and the setup."""
