"""What ranks agree on before they send: largest magnitudes.

Blocks of which several ranks hold parts are quantized by the largest magnitudes of all. Magnitudes
of bfloat16 are ordered as their bits are, with NaN above infinity, so that ranks take the largest
of 16-bit words.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.errors import ConfigError, MalformedMessage, SourceChanged
from deltasync.sync.source.tensors import Maxima, Place

Words: TypeAlias = NDArray[np.uint16]
"""Bits of bfloat16 that are not negative."""

NOTHING = np.zeros(0, np.uint16)


class Agreement:
    """Which maxima are agreed on, one run of them after another.

    Attributes:
        runs: (name, size) of each.
    """

    def __init__(self, runs: Sequence[tuple[str, int]] = ()) -> None:
        self.runs, self.size = tuple(runs), 0
        self._starts: dict[str, int] = {}
        for name, size in self.runs:
            self._starts[name] = self.size
            self.size += size

    @classmethod
    def of(cls, declared: Sequence[Sequence[Place]]) -> Agreement:
        """What crosses ranks, of what each has declared.

        Raises ConfigError if they differ about a size.
        """
        ranks = Counter(place.name for one in declared for place in one)
        crossing = {p.name for one in declared for p in one if p.crosses and ranks[p.name] > 1}
        sizes: dict[str, int] = {}
        for place in (place for one in declared for place in one if place.name in crossing):
            if sizes.setdefault(place.name, place.size) != place.size:
                raise ConfigError(
                    f"{place.name}: ranks have {sizes[place.name]} and {place.size} maxima of it; "
                    "let all of them serve the same forms"
                )
        return cls(list(sizes.items()))

    def positions(self, places: Sequence[Place]) -> NDArray[np.int64]:
        """int64[n]: where what one rank knows lies among all."""
        runs = [
            np.arange(place.count) + (self._starts[place.name] + place.begin)
            for place in places
            if place.name in self._starts
        ]
        return np.concatenate([np.zeros(0, np.int64), *runs])

    def largest(self, positions: Sequence[NDArray[np.int64]], found: Sequence[Words]) -> Words:
        """uint16[size]: the largest of what ranks have found at their positions.

        Raises MalformedMessage if one has found more or fewer.
        """
        total = np.zeros(self.size, np.uint16)
        for rank, (at, words) in enumerate(zip(positions, found, strict=True)):
            if len(at) != len(words):
                raise MalformedMessage(f"rank {rank} has {len(words)} maxima, declared {len(at)}")
            total[at] = np.maximum(total[at], words)
        return total

    def found(self, declared: Sequence[Place], now: Mapping[str, Maxima]) -> Words:
        """What this rank has to tell. Raises SourceChanged if it is not what it has declared."""
        asked = [place for place in declared if place.name in self._starts]
        for place in asked:
            if place.name not in now or now[place.name].place != place:
                raise SourceChanged(
                    f"{place.name}: its sharding has changed; make new senders on all ranks"
                )
        if not asked:
            return NOTHING
        device = now[asked[0].name].device
        bits = torch.cat([now[place.name].own().to(device) for place in asked])
        words: Words = bits.view(torch.int16).cpu().numpy().view(np.uint16)
        return words

    def give(self, agreed: Words, now: Mapping[str, Maxima]) -> None:
        """Tell the source what all have agreed on. Raises MalformedMessage for another size."""
        if len(agreed) != self.size:
            raise MalformedMessage(f"{len(agreed)} maxima are agreed on, {self.size} are needed")
        if not self.size:
            return
        peaks = torch.from_numpy(agreed.view(np.int16)).view(torch.bfloat16)
        there = {device: peaks.to(device) for device in {one.device for one in now.values()}}
        for name, start in self._starts.items():
            if (one := now.get(name)) is not None:
                begin = start + one.place.begin
                one.agree(there[one.device][begin : begin + one.place.count])


def text_of(words: Words) -> str:
    """As messages have them."""
    return base64.b64encode(words.astype("<u2").tobytes()).decode()


def words_of(text: str) -> Words:
    """uint16[n] of a message. Raises MalformedMessage."""
    try:
        data = base64.b64decode(text, validate=True)
        return np.frombuffer(data, "<u2").astype(np.uint16)
    except (binascii.Error, ValueError) as error:
        raise MalformedMessage(f"no maxima: {error}") from error
