"""Modules with the names and shapes of real models, and random bf16 weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a decoder of the Qwen3 family.

    Attributes:
        hidden, layers, heads, kv_heads, head_dim, vocab: As in its configuration.
        intermediate: Of the MLP, or of each expert.
        experts: Per layer; 0 for a plain MLP.
        tied: No head of its own.
    """

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151_936
    experts: int = 0
    tied: bool = True

    def shapes(self) -> Shapes:
        """Shapes by checkpoint name, in checkpoint order."""
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            parts = self._attention() | self._mlp(layer) | self._norms()
            shapes |= {f"{prefix}.{name}.weight": shape for name, shape in parts.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes().values()))

    def build(self, device: torch.device) -> nn.Module:
        """The model with random weights: the same bits on every device of one kind."""
        return assembled(self.tensors(device))

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Its weights one by one, for those who keep parts of them."""
        generator = torch.Generator(device).manual_seed(0)
        for name, shape in self.shapes().items():
            values = torch.empty(shape, dtype=torch.bfloat16, device=device)
            yield name, values.normal_(0, 0.02, generator=generator)

    def _attention(self) -> Shapes:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
        }

    def _mlp(self, layer: int) -> Shapes:
        one = self._gated(self.intermediate)
        if not self.experts:
            return {f"mlp.{name}": shape for name, shape in one.items()}
        shapes: Shapes = {"mlp.gate": (self.experts, self.hidden)}
        for expert in range(self.experts):
            shapes |= {f"mlp.experts.{expert}.{name}": shape for name, shape in one.items()}
        return shapes

    def _gated(self, width: int) -> Shapes:
        return {
            "gate_proj": (width, self.hidden),
            "up_proj": (width, self.hidden),
            "down_proj": (self.hidden, width),
        }

    def _norms(self) -> Shapes:
        return {"input_layernorm": (self.hidden,), "post_attention_layernorm": (self.hidden,)}


def assembled(tensors: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """A module of these parameters."""
    root = nn.Module()
    for name, tensor in tensors:
        path, _, leaf = name.rpartition(".")
        submodule(root, path).register_parameter(leaf, nn.Parameter(tensor))
    return root


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path, made of plain modules where it is not there yet."""
    module = root
    for part in path.split("."):
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


@dataclass(frozen=True, slots=True)
class Many(Geometry):
    """As many parameters of 64 elements as `layers` says."""

    def shapes(self) -> Shapes:
        return {f"many.p{number}": (64,) for number in range(self.layers)}


GEOMETRIES = {
    "qwen3-1.7b": Geometry(2048, 28, 6144, 16, 8),
    "qwen3-8b": Geometry(4096, 36, 12_288, 32, 8, tied=False),
    "qwen3-30b-a3b": Geometry(2048, 48, 768, 32, 4, experts=128, tied=False),
    # As many parameters as the 30B model, as many elements as the 1.7B one.
    "moe-small": Geometry(512, 48, 150, 32, 4, experts=128),
    # As many parameters as Kimi-K2, 70 thousand, and as many elements again.
    "moe-most": Geometry(256, 61, 91, 4, 4, 64, vocab=163_840, experts=384, tied=False),
    # For engines on CPUs: as many elements in 91 tensors and in 1,611.
    "engine": Geometry(1024, 8, 3072, 16, 8, head_dim=64, vocab=16_384, tied=False),
    "engine-moe": Geometry(512, 8, 192, 8, 4, head_dim=64, vocab=16_384, experts=64, tied=False),
    # 66 Mi elements, as many for a quick run as a sixteenth of that, and two checkpoints of 1 GiB.
    "cpu": Geometry(2048, 1, 4096, 16, 4, vocab=8192, tied=False),
    "cpu-small": Geometry(512, 1, 1024, 4, 1, vocab=2048, tied=False),
    "cpu-files": Geometry(2048, 15, 4096, 16, 4, vocab=8192, tied=False),
    "cpu-many": Many(0, 20_000, 0, 0, 0),
    "tiny-many": Many(0, 50, 0, 0, 0),
    "small": Geometry(1024, 4, 3072, 8, 4, vocab=8192),  # for CPUs
    "tiny": Geometry(64, 2, 192, 2, 1, head_dim=32, vocab=512),
    "tiny-moe": Geometry(64, 2, 24, 2, 1, head_dim=32, vocab=512, experts=8),
    "tiny-most": Geometry(64, 3, 16, 2, 2, 32, vocab=512, experts=12, tied=False),
    "tiny-4x": Geometry(128, 2, 384, 4, 2, head_dim=32, vocab=1024),
}
