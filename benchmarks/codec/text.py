"""Seeded text with a structure that a language model can learn: a Markov chain that repeats itself.

A token is followed by one of its few successors (70 %), by the token that stood eight places
before (15 %), or by any token, the frequent ones more often (15 %).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

_SUCCESSORS = torch.tensor([8.0, 4.0, 2.0, 1.0])  # how often each of them comes
_FOLLOWS, _REPEATS, _ANY = 0, 1, 2
_KINDS = torch.tensor([0.7, 0.15, 0.15])
_LOOK_BACK = 8


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """What a policy asks of a task, and text to learn from.

    Attributes:
        vocabulary_size: Number of tokens. Token n is about 1 / (n + 1) as frequent as token 0.
        prompt_length, answer_length: Tokens of a prompt and of an answer to it.
        successors: int64[vocabulary_size, 4], the likely ones of each token.
    """

    vocabulary_size: int
    prompt_length: int
    answer_length: int
    successors: Tensor

    @classmethod
    def of(cls, vocabulary_size: int, *, prompt_length: int = 12, answer_length: int = 8) -> Text:
        """The same text for the same size."""
        generator = torch.Generator().manual_seed(0)
        count = vocabulary_size * len(_SUCCESSORS)
        drawn = torch.multinomial(_zipf(vocabulary_size), count, True, generator=generator)
        return cls(vocabulary_size, prompt_length, answer_length, drawn.view(vocabulary_size, -1))

    def windows(self, count: int, generator: Generator) -> Tensor:
        """int64[count, prompt and answer] pieces of text."""
        length = self.prompt_length + self.answer_length
        shape = count, length
        anything = torch.multinomial(
            _zipf(self.vocabulary_size), count * length, True, generator=generator
        ).view(shape)
        kinds = torch.multinomial(_KINDS, count * length, True, generator=generator).view(shape)
        which = torch.multinomial(_SUCCESSORS, count * length, True, generator=generator)
        which = which.view(shape)
        tokens = anything.clone()
        for place in range(1, length):
            follows = self.successors[tokens[:, place - 1], which[:, place]]
            repeats = tokens[:, max(0, place - _LOOK_BACK)]
            kind = kinds[:, place]
            tokens[kind == _FOLLOWS, place] = follows[kind == _FOLLOWS]
            tokens[kind == _REPEATS, place] = repeats[kind == _REPEATS]
        return tokens

    def rewards(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """float32[B]: the share of an answer's tokens that are successors of the one before."""
        before = torch.cat([prompts[:, -1:], answers[:, :-1]], dim=1)
        return (self.successors[before] == answers.unsqueeze(2)).any(dim=2).float().mean(dim=1)


def _zipf(size: int) -> Tensor:
    """float32[size]: how often each token comes."""
    return 1 / torch.arange(1, size + 1)
