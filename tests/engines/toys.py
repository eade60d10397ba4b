"""Toy models of any text architecture that vLLM knows: a configuration, and a random checkpoint.

Where transformers has the architecture, its own model says what the checkpoint's tensors are
called. Where it has not, vLLM's model does: what it fuses is taken apart again.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.engines import cold

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""A checkpoint's tensors by name."""

# Set where a configuration has such a setting, whatever the architecture.
_SMALL: dict[str, Any] = {
    "vocab_size": 1000,  # engines pad it to a multiple of 64
    "vocab_size_per_layer_input": 1000,
    "hidden_size": 256,
    "n_embd": 256,
    "d_model": 256,
    "intermediate_size": 512,
    "ffn_dim": 512,
    "n_inner": 512,
    "word_embed_proj_dim": 256,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "n_positions": 1024,
    "max_seq_len": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "expert_ffn_hidden_size": 128,
    "ffn_hidden_size": 512,
    "shared_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "state_size": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "time_step_rank": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "sliding_window": 64,
    "hidden_size_per_layer_input": 64,
    "laurel_rank": 16,
}
# Given where vLLM asks a configuration for it in vain.
_MISSING: dict[str, Any] = _SMALL | {
    "activation_function": "silu",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "attn_output_gate": False,
    "block_auto_adjust_ff_dim": False,
    "block_dim": 256,
    "block_ff_dim": 512,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 64,
    "conv_L_cache": 3,
    "decoder_sparse_step": 1,
    "dim_model_base": 256,
    "emb_dim": 256,
    "embedding_dropout": 0.0,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "hc_eps": 1e-6,
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "initializer_range": 0.02,
    "layer_group_size": 2,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "layernorm_epsilon": 1e-6,
    "loop_num": 2,
    "loop_window_size": 64,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": 128,
    "mup_width_scale": 1.0,
    "norm_eps": 1e-6,
    "norm_topk_prob": True,
    "num_attention_groups": 2,
    "num_experts_shared": 1,
    "padded_vocab_size": 1000,
    "qkv_bias": False,
    "query_pre_attn_scalar": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rotary_dim": 64,
    "route_norm": True,
    "route_scale": 1.0,
    "routed_scaling_factor": 1.0,
    "router_enable_expert_bias": False,
    "scale_depth": 1.0,
    "scale_emb": 1.0,
    "score_func": "sigmoid",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "zero_expert_num": 0,
    "zero_expert_type": "identity",
}
UNSET = object()
"""As a setting's value: the configuration's own."""
# What an architecture wants otherwise, or has no configuration of its own for in transformers.
_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
_PANGU_SINKS = _MOE | {
    "model_type": "llama",
    "hidden_act": "silu",
    "router_enable_expert_bias": False,
    "param_sink_number": 2,
    "param_sink_with_value": True,
    "qk_nope_dim": 32,
    "qk_rope_dim": 32,
    "v_channels": 64,
    "sandwich_norm": False,
}
_CHATGLM = {
    "model_type": "chatglm",
    "num_layers": 2,
    "padded_vocab_size": 1000,
    "ffn_hidden_size": 512,
    "kv_channels": 64,
    "seq_length": 1024,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "original_rope": True,
}
_MIMO_V2 = _MOE | {
    "model_type": "mimo_v2_flash",
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,  # twice those of full attention, as transformers has it
    "swa_head_dim": 64,
    "swa_v_head_dim": 64,
    "v_head_dim": 64,
    "sliding_window_size": 64,
    "sliding_window": 64,
    "attention_bias": False,
    "add_swa_attention_sink_bias": True,
    "layernorm_epsilon": 1e-6,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
}
TOYS: dict[str, dict[str, Any]] = {
    "Step3TextForCausalLM": {
        "model_type": "step3_text",
        "num_attention_groups": 1,
        "max_position_embedding": 1024,
        "moe_intermediate_size": 128,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 256,
        "share_q_dim": 128,
        "moe_layers_enum": "1",
    },
    "MiMoV2FlashForCausalLM": _MIMO_V2,
    "MiMoV2ForCausalLM": _MIMO_V2,
    "BailingMoeV3ForCausalLM": {"model_type": "llama", "no_kda_lora": True, "num_experts": 4},
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
    "ExaoneMoEForCausalLM": {"model_type": "exaone_moe"},
    "DbrxForCausalLM": {
        "d_model": 256,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2}
        | {"hidden_size": 256},
    },
    "DeepseekForCausalLM": _MOE | {"moe_layer_freq": 1, "n_routed_experts": 4},
    "FalconForCausalLM": {"head_dim": UNSET, "multi_query": True, "new_decoder_architecture": False}
    | {"alibi": False, "bias": False, "parallel_attn": True, "num_key_value_heads": UNSET},
    "Gemma4ForCausalLM": {"head_dim": UNSET},
    # Real configurations have these, and vLLM wants them; transformers' own have not.
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 128, "qk_norm": True},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Llama4ForCausalLM": {"model_type": "llama4_text", "intermediate_size_mlp": 512}
    | {"interleave_moe_layer_step": 2},
    "MiniMaxM2ForCausalLM": {"use_routing_bias": True},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 64, "n_groups": 1},
    "PanguEmbeddedForCausalLM": {k: v for k, v in _PANGU_SINKS.items() if k not in _MOE}
    | {"first_k_dense_replace": 2},
    "PanguProMoEV2ForCausalLM": _PANGU_SINKS,
}


def toy_config(architecture: str) -> dict[str, Any]:
    """A small configuration; of a Llama where nobody says what kind of model it is."""
    import transformers

    wanted = dict(TOYS.get(architecture, {}))
    kind = wanted.pop("model_type", None) or _model_types().get(architecture.lower(), "llama")
    if kind in transformers.CONFIG_MAPPING:
        known = transformers.AutoConfig.for_model(kind)
        asked = [key for key in _SMALL if key not in wanted and _has(known, key)]
        small = {key: _SMALL[key] for key in asked} | wanted
    else:
        small = {key: _SMALL[key] for key in _DENSE} | wanted
    small = {key: value for key, value in small.items() if value is not UNSET}
    return small | {
        "model_type": kind,
        "architectures": [architecture],
        "torch_dtype": "bfloat16",
    }


_DENSE = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


def _has(config: Any, key: str) -> bool:
    return hasattr(config, key) or key in getattr(config, "attribute_map", {})


def _model_types() -> dict[str, str]:
    """By the name of transformers' class, in lower case: engines write some names otherwise."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for table in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES"):
        for kind, names in getattr(modeling_auto, table).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name.lower(), kind)
    return found


def write_toy(architecture: str, folder: Path) -> None:
    """The folder's configuration, with what vLLM asks it for. Raises what vLLM raises."""
    config = toy_config(architecture)
    while True:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            cold.unloaded(folder)
        except AttributeError as error:
            missing = re.search(r"Config' object has no attribute '(\w+)'", str(error))
            name = missing[1] if missing else ""
            if name in config or name not in _MISSING:
                raise
            config[name] = _MISSING[name]
        else:
            return


def saved_by_transformers(folder: Path) -> Specs:
    """What transformers' own model of this configuration saves. Raises what it raises."""
    import transformers
    from safetensors import safe_open

    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if type(model).__name__.lower() != config.architectures[0].lower():
        raise TypeError(f"transformers makes a {type(model).__name__} of it")
    model.save_pretrained(folder / "saved")
    with safe_open(folder / "saved" / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no mapping
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def taken_apart(model: nn.Module) -> Specs:
    """What vLLM's model is loaded from, by what it says that it fuses."""
    found: Specs = {}
    own = _APART.get(type(model).__name__, _no_parts)
    for name, parameter in model.named_parameters():
        if parts := own(model.config, name, tuple(parameter.shape)):
            found |= {part: (parameter.dtype, shape) for part, shape in parts}
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        for part, shape in _parts(model, owner, name, parameter):
            found[part] = (parameter.dtype, shape)
    return found


Parts = list[tuple[str, tuple[int, ...]]]


def _no_parts(config: Any, name: str, shape: tuple[int, ...]) -> Parts:
    return []


def _step3(config: Any, name: str, shape: tuple[int, ...]) -> Parts:
    """One head of keys and values; experts that the checkpoint has stacked."""
    above, _, last = name.partition(".moe.experts.routed_experts.")
    if last == "w13_weight":
        half = (shape[0], shape[1] // 2, shape[2])
        return [(f"{above}.moe.{part}_proj.weight", half) for part in ("gate", "up")]
    if last == "w2_weight":
        return [(f"{above}.moe.down_proj.weight", shape)]
    if ".qkv_proj." in name:
        sizes = {"q": config.share_q_dim, "k": config.head_dim, "v": config.head_dim}
        return [(name.replace("qkv", part), (n, *shape[1:])) for part, n in sizes.items()]
    return []


def _pangu(config: Any, name: str, shape: tuple[int, ...]) -> Parts:
    """Fused in the checkpoint already where there are sinks."""
    whole = ".qkv_proj." in name and getattr(config, "param_sink_number", 0) > 0
    return [(name, shape)] if whole else []


_APART = {
    "Step3TextForCausalLM": _step3,
    "PanguEmbeddedForCausalLM": _pangu,
    "PanguProMoEV2ForCausalLM": _pangu,
}
_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def _parts(
    model: Any, owner: Any, name: str, parameter: Tensor
) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = tuple(parameter.shape)
    path, _, leaf = name.rpartition(".")
    above, _, last = path.rpartition(".")
    fused = _FUSED | getattr(model, "packed_modules_mapping", {})
    if leaf.startswith(("w13_", "w2_")) and "experts" in name:
        yield from _experts(name, shape)
    elif last in fused and len(fused[last]) > 1 and hasattr(owner, "output_sizes"):
        for part, size in zip(fused[last], owner.output_sizes, strict=True):
            yield f"{above}.{part}.{leaf}", (size, *shape[1:])
    elif hasattr(owner, "org_vocab_size") and shape[0] > owner.org_vocab_size:
        yield name, (owner.org_vocab_size, *shape[1:])
    else:
        yield name, shape


def _experts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    above = name[: name.index("experts.") + len("experts")]
    leaf = name.rpartition(".")[2]
    kind, what = leaf.split("_", 1)
    for number in range(shape[0]):
        if kind == "w13":
            half = (shape[1] // 2, *shape[2:])
            yield f"{above}.{number}.gate_proj.{what}", half
            yield f"{above}.{number}.up_proj.{what}", half
        else:
            yield f"{above}.{number}.down_proj.{what}", shape[1:]


def specs_of(folder: Path) -> tuple[str, Specs]:
    """A checkpoint's tensors, and who said so. Raises what vLLM raises when it loads them."""
    why = ""
    ways: dict[str, Callable[[], Specs]] = {
        "transformers": lambda: saved_by_transformers(folder),
        "vLLM": lambda: taken_apart(cold.unloaded(folder)),
    }
    for how, say in ways.items():
        try:
            specs = say()
            cold.cold(folder, random_weights(specs, 0))
        except Exception as error:  # noqa: BLE001 whatever it lacks
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error}"[:400]
            why += f" | {how}: {said} ({Path(where.filename).name}:{where.lineno})"
        else:
            return how + why, specs
    raise TypeError(f"no checkpoint can be loaded{why}")


def random_weights(specs: Specs, seed: int) -> dict[str, Tensor]:
    """No two of them alike, small as weights are, without NaN once they are worked on."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (dtype, shape) in sorted(specs.items()):
        if dtype.is_floating_point:
            found[name] = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        else:
            found[name] = torch.randint(0, 4, shape, generator=generator).to(dtype)
    return found


def touched(weights: dict[str, Tensor], count: int, seed: int) -> dict[str, Tensor]:
    """A few elements of every tensor drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        flat = tensor.view(-1)
        places = torch.randint(0, max(1, flat.numel()), (count,), generator=generator)
        if flat.numel() and flat.dtype.is_floating_point:
            flat[places] = (torch.randn(count, generator=generator) * 0.05).to(flat.dtype)
    return new
