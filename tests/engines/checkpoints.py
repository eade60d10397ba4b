"""Small checkpoints of many architectures, each with a loader of its own in an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync import NamedTensor, WeightSource

_SMALL = {
    "vocab_size": 1000,  # engines pad it to a multiple of 64
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "tie_word_embeddings": False,
}
_LLAMA = _SMALL | {"num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = _LLAMA | {
    "model_type": "deepseek_v2",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA | {"model_type": "llama"},
    # Tied embeddings.
    "Qwen3ForCausalLM": _LLAMA
    | {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    # Biases of fused projections.
    "Qwen2ForCausalLM": _LLAMA | {"model_type": "qwen2"},
    # Fused in the checkpoint already.
    "Phi3ForCausalLM": _LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 128},
    # Experts that are stacked.
    "Qwen3MoeForCausalLM": _LLAMA
    | _EXPERTS
    | {"model_type": "qwen3_moe", "head_dim": 64, "decoder_sparse_step": 1, "mlp_only_layers": []},
    # Shared experts beside them.
    "Qwen2MoeForCausalLM": _LLAMA
    | _EXPERTS
    | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "MixtralForCausalLM": _LLAMA
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    # Norms beside what they normalise, tied.
    "Gemma2ForCausalLM": _LLAMA
    | {
        "model_type": "gemma2",
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    # Latent attention.
    "DeepseekV2ForCausalLM": _LATENT,
    # The same, with a low rank of queries too.
    "DeepseekV3ForCausalLM": _LATENT
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 64,
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
    },
    # Matrices that are transposed.
    "GPT2LMHeadModel": _SMALL
    | {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128}
    | {"tie_word_embeddings": True},
    # Experts that its loader writes by itself, and sinks.
    "GptOssForCausalLM": _LLAMA
    | {"model_type": "gpt_oss", "head_dim": 64, "intermediate_size": 256, "sliding_window": 128}
    | {"num_local_experts": 4, "num_experts_per_tok": 2}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    # Experts by names of their own (w1, w2, w3).
    "PhiMoEForCausalLM": _LLAMA | _LOCAL | {"model_type": "phimoe"},
    "MiniMaxM2ForCausalLM": _LLAMA
    | _LOCAL
    | {"model_type": "minimax_m2", "head_dim": 64, "rotary_dim": 32, "use_qk_norm": True}
    | {"use_routing_bias": True, "scoring_func": "sigmoid"},
    # Convolutions in place of attention.
    "Lfm2MoeForCausalLM": _LLAMA
    | _EXPERTS
    | {"model_type": "lfm2_moe", "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
    | {"tie_word_embeddings": True},
    # Experts stacked and transposed in the checkpoint.
    "Llama4ForCausalLM": _LLAMA
    | _LOCAL
    | {"model_type": "llama4_text", "head_dim": 64, "intermediate_size_mlp": 512}
    | {"interleave_moe_layer_step": 2},
    # Experts beside a dense layer, as transformers saves them.
    "HYV3ForCausalLM": _LLAMA
    | _EXPERTS
    | {"model_type": "hy_v3", "head_dim": 64, "num_shared_experts": 1, "route_norm": True}
    | {"expert_hidden_dim": 128, "first_k_dense_replace": 1, "qk_norm": True},
    # Heads of another size in each kind of layer.
    "MiMoV2FlashForCausalLM": _LLAMA
    | {"model_type": "mimo_v2_flash", "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 128, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    | {"head_dim": 64, "v_head_dim": 32, "swa_head_dim": 64, "swa_v_head_dim": 32}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "attention_bias": False}
    | {"layer_types": ["full_attention", "sliding_attention"], "hybrid_layer_pattern": [0, 1]}
    | {"sliding_window": 64, "sliding_window_size": 64, "moe_layer_freq": [0, 1]}
    | {"layernorm_epsilon": 1e-6, "add_swa_attention_sink_bias": True},
    # Exponentiates.
    "MambaForCausalLM": _SMALL
    | {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2}
    | {"time_step_rank": 16, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu"},
}


Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""A checkpoint's tensors by name."""


class Weights(WeightSource):
    """A trainer's weights by checkpoint name."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor((name,), tensor) for name, tensor in self.weights.items()]

    def take(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)


def write_config(architecture: str, folder: Path, more: Mapping[str, Any] | None = None) -> Path:
    """A folder that a model can be made from; `more` is added to its configuration.

    What is not in CONFIGS has a Llama's sizes.
    """
    config = (
        CONFIGS.get(architecture, _LLAMA) | {"architectures": [architecture]} | dict(more or {})
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def checkpoint(folder: Path, seed: int) -> dict[str, Tensor]:
    """Random weights by checkpoint name, as transformers writes them."""
    import transformers
    from safetensors.torch import load_file

    if not (folder / "model.safetensors").exists():
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(folder / "saved")
        (folder / "saved" / "model.safetensors").rename(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in sorted(load_file(folder / "model.safetensors").items())
    }


def save(folder: Path, weights: dict[str, Tensor]) -> None:
    """The checkpoint that engines are started on from now on."""
    from safetensors.torch import save_file

    kept = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def write_model(folder: Path) -> None:
    """All that an engine can be started on: weights, and a tokenizer that knows numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save(folder, {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()})
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(1000)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", bos_token="1", eos_token="2"
    ).save_pretrained(folder)


def random_weights(specs: Specs, seed: int) -> dict[str, Tensor]:
    """No two of them alike, small as weights are, without NaN once they are worked on."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, (dtype, shape) in sorted(specs.items())
    }


def changed(weights: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Some elements of every tensor are larger."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        mask = torch.rand(tensor.shape, generator=generator) < share
        tensor[mask] *= 1.5
    return new
