"""The policy: a small decoder-only transformer, and how to sample answers from it.

Letters in shapes: B batch, T tokens, H heads, D features of a head, W width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from deltasync.demo.task import SortTask


@dataclass(frozen=True, slots=True)
class PolicySize:
    """The default has 3.2 million parameters."""

    width: int = 256
    num_heads: int = 4
    num_layers: int = 4


Cache = list[Tensor]
"""The keys and values that one layer has seen, [2, B, H, T so far, D]; empty at first."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: PolicySize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """[B, T, W] to [B, T, W]. With a cache, T is the whole prompt or one token."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        keys_values = qkv[1:]
        if cache is not None:
            keys_values = torch.cat([*cache, keys_values], dim=3)
            cache[:] = [keys_values]
        keys, values = keys_values
        y = F.scaled_dot_product_attention(qkv[0], keys, values, is_causal=length > 1)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, size: PolicySize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """[B, T, W] to [B, T, W]."""
        x = x + self.attention(self.attention_norm(x), cache)
        y: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return y


class Policy(nn.Module):
    """A transformer whose input and output embeddings are tied."""

    def __init__(self, task: SortTask, size: PolicySize) -> None:
        super().__init__()
        self.answer_length = task.answer_length
        self.embedding = nn.Embedding(task.vocabulary_size, size.width)
        self.positions = nn.Embedding(task.prompt_length + task.answer_length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, task.vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None, start: int = 0) -> Tensor:
        """Logits [B, T, V] of int64[B, T], whose first token stands at position `start`."""
        x = self.embedding(tokens) + self.positions(torch.arange(start, start + tokens.shape[1]))
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def answer_log_probs(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Log-probability of each answer token given all before it. float32[B, answer_length]."""
        logits: Tensor = self(torch.cat([prompts, answers[:, :-1]], dim=1))
        log_probs = logits[:, prompts.shape[1] - 1 :].float().log_softmax(dim=-1)
        return log_probs.gather(2, answers.unsqueeze(2)).squeeze(2)

    @torch.no_grad()
    def sample(self, prompts: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Answer each prompt at temperature 1.

        Returns:
            int64[B, answer_length] tokens and float32[B, answer_length] their log-probabilities.
        """
        caches: list[Cache] = [[] for _ in self.blocks]
        tokens, start = prompts, 0
        answers, log_probs = [], []
        for _ in range(self.answer_length):
            distribution = self(tokens, caches, start)[:, -1].float().log_softmax(dim=-1)
            start += tokens.shape[1]
            tokens = torch.multinomial(distribution.exp(), 1, generator=generator)
            answers.append(tokens)
            log_probs.append(distribution.gather(1, tokens))
        return torch.cat(answers, dim=1), torch.cat(log_probs, dim=1)

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters as bf16, by name; what is tied comes once."""
        named = self.named_parameters()
        return {name: weight.detach().to(torch.bfloat16, copy=True) for name, weight in named}

    def sha256(self) -> str:
        """Of the bytes of every parameter as bf16, in order."""
        digest = hashlib.sha256()
        for weight in self.weights().values():
            digest.update(weight.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()
