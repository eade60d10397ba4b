"""What is tried of real engines on GPUs, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine, how it is started, and what happens between syncs.

    Attributes:
        architecture: Key of `checkpoints.CONFIGS`, or a Llama that `config` makes another.
        setup: How it runs, in a few words: a column of the table.
        config: Added to the checkpoint's configuration.
        settings: Of vLLM's engine.
        environment: Variables of its processes.
        workers: GPUs that it takes.
        form: Key of `quantized.CONFIGS`, for engines that are started on quantized checkpoints.
        engine: What runs.
        sleeps: The engine sleeps before each sync, by turns at level 1 and 2.
        draft: Key of `drafts.DRAFTS`, for engines with a draft model.
    """

    architecture: str
    setup: str = "eager"
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    workers: int = 1
    form: str = ""
    engine: Literal["vllm", "sglang"] = "vllm"
    sleeps: bool = False
    draft: str = ""

    @property
    def name(self) -> str:
        return f"{self.architecture}/{self.setup}"


_GRAPHS: dict[str, Any] = {"enforce_eager": False}
# The sizes for which there are kernels of latent attention.
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
}
# Of block FP8. By default vLLM's DeepGEMM has scales that are powers of two.
_MATRICES = {
    "plain scales": {"VLLM_USE_DEEP_GEMM_E8M0": "0"},
    "no DeepGEMM": {"VLLM_USE_DEEP_GEMM": "0"},
}
_EAGER = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "Gemma2ForCausalLM",
    "Phi3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
)
_FORMS = ("block FP8", "channel FP8", "channel INT8", "MXFP8", "NVFP4", "INT4")
# Blocks of scales divide what each of two ranks has.
_WIDE: dict[str, Any] = {"num_key_value_heads": 4, "moe_intermediate_size": 256}
_SPLIT: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "TP 2, EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "PP 2": {"pipeline_parallel_size": 2},
}


def _case(architecture: str, setup: str = "eager", **others: Any) -> Case:
    config = _CONFIGS.get(architecture, {}) | others.pop("config", {})
    return Case(architecture=architecture, setup=setup, config=config, **others)


def _on_one() -> Iterator[Case]:
    llama, moe, latent = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"
    for architecture in _EAGER:
        yield _case(architecture)
    for architecture in (llama, moe, latent):
        yield _case(architecture, "CUDA graphs", settings=_GRAPHS)
    for backend in ("FLASHMLA", "TRITON_MLA"):
        yield _case(latent, backend, settings={"attention_backend": backend})
    for architecture in (llama, moe):
        for form in _FORMS:
            yield _case(architecture, form, form=form, settings=_GRAPHS)
        for how, environment in _MATRICES.items():
            setup = f"block FP8, {how}"
            yield _case(architecture, setup, form="block FP8", environment=environment)
    yield _case(llama, "online FP8", settings={"quantization": "fp8_per_channel"})
    for draft in ("a model", "EAGLE"):
        yield _case(llama, f"drafts of {draft}", draft=draft, settings={"max_model_len": 128})
    sleeping = {"enable_sleep_mode": True}
    yield _case(llama, "sleep", settings=sleeping, sleeps=True)
    yield _case(latent, "sleep", settings=sleeping, sleeps=True)
    yield _case(moe, "sleep, channel FP8", form="channel FP8", settings=sleeping, sleeps=True)


def _of_sglang() -> Iterator[Case]:
    # The packed kernels are older than SGLang asks for, and FlashInfer's are not packed.
    environment = {
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    }
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        yield _case(architecture, "SGLang", engine="sglang", environment=environment)


def _on_two() -> Iterator[Case]:
    mp: dict[str, Any] = {"distributed_executor_backend": "mp"}
    for architecture, setups in {
        "LlamaForCausalLM": ("TP 2", "PP 2"),
        "Qwen3ForCausalLM": ("TP 2",),
        "Qwen2MoeForCausalLM": ("TP 2, EP 2",),  # shared experts are split
        "Qwen3MoeForCausalLM": _SPLIT,
        "DeepseekV2ForCausalLM": _SPLIT,
    }.items():
        for setup in setups:
            yield _case(architecture, setup, settings=mp | _SPLIT[setup], workers=2)
    for architecture, setup, forms in (
        ("LlamaForCausalLM", "TP 2", ("channel FP8", "INT4")),
        ("Qwen3MoeForCausalLM", "TP 2", ("block FP8", "channel FP8")),
        ("Qwen3MoeForCausalLM", "TP 2, EP 2", ("block FP8", "channel FP8")),
    ):
        for form in forms:
            yield _case(
                architecture,
                f"{setup}, {form}",
                form=form,
                config=_WIDE,
                settings=mp | _SPLIT[setup],
                workers=2,
            )


CASES = {case.name: case for case in (*_on_one(), *_of_sglang(), *_on_two())}
"""By name: the architecture and the setup."""
