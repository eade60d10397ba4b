"""Tensors of 4-bit codes that an engine keeps in another order than the checkpoint.

Kernels of 4-bit weights move single codes from one word to another. So an element of the checkpoint
has no address: its codes are in several words, and these have codes of other elements too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.bits import INTEGERS, Live, Spread
from deltasync.delta.region import Region
from deltasync.dtypes import Dtype
from deltasync.engines.routes.route import Part, Piece

CODE_BITS = 4
_MASK = (1 << CODE_BITS) - 1


class Codes(Part):
    """Elements whose 4-bit codes are written one by one: see `delta.bits.Live`.

    A write adds the difference of each code to the word that has it. Differences of several codes
    in one word add up, in any order, to exactly what changes the word; codes that are not written
    stay as they are.

    Args:
        pieces: Where the codes are. All pieces have one; each element has all of its codes.
        live: The live tensors that they name. Not owned.
        dtype: Of the elements.
        numel: Elements of the checkpoint tensor, some of which may be held elsewhere.
    """

    in_codes = True

    def __init__(
        self, pieces: Sequence[Piece], live: Mapping[str, Tensor], dtype: Dtype, numel: int
    ) -> None:
        alike: dict[tuple[object, ...], list[Piece]] = {}
        for piece in pieces:
            alike.setdefault((piece.live, piece.source, piece.target.dims), []).append(piece)
        bits = INTEGERS[dtype.item_size]
        self._codes = [_Box.of(some, live[some[0].live], bits) for some in alike.values()]
        held = [piece.source for piece in pieces if piece.code == 0]
        super().__init__(
            [(box.source, box) for box in self._codes],
            held,
            dtype,
            self._codes[0].words.new_empty(0, dtype=bits),
            is_whole=held == [Region.run(0, numel)],
        )

    def spread(self) -> list[Spread] | None:
        """None if codes are spread over words in another way in each element."""
        found = [box.as_spread(2 * self.dtype.item_size) for box in self._codes]
        return None if None in found else [one for one in found if one is not None]


@dataclass(frozen=True)
class _Box(Live):
    """Some codes of some elements, all of them equally far apart in every element.

    No element has an address: there are no `boxes`.

    Attributes:
        source: The elements.
        target: Where the first code of each is, in codes of the storage.
        apart: int64[codes]: how much farther each code is than the first.
        order: int64[codes]: which code of its element each is, rising.
        words: int[...]: the storage. Not owned.
        bits: The type that carries an element.
    """

    source: Region
    target: Region
    apart: Tensor
    order: Tensor
    words: Tensor
    bits: torch.dtype

    @classmethod
    def of(cls, pieces: Sequence[Piece], live: Tensor, bits: torch.dtype) -> _Box:
        """Of pieces that differ in their codes and where these begin."""
        storage, first = live.untyped_storage(), pieces[0]
        dtype = torch.uint8 if storage.nbytes() % 4 else torch.int32
        words = torch.empty(0, dtype=dtype, device=live.device).set_(storage)
        pieces = sorted(pieces, key=lambda one: one.code or 0)
        columns = [(one.target.start - first.target.start, one.code) for one in pieces]
        apart, order = torch.tensor(columns, device=live.device).unbind(1)
        return cls(first.source, first.target, apart, order, words, bits)

    def as_spread(self, count: int) -> Spread | None:
        """What kernels need; None if here are not all codes of the elements, which are `count`."""
        if len(self.order) != count or self.words.dtype != torch.int32:
            return None
        target = Region(0, self.target.dims)
        apart = (self.apart + self.target.start).tolist()
        return Spread(self.words.data_ptr(), self.source, target, tuple(apart))

    def gather(self, positions: Tensor) -> Tensor:
        """int[n]: the codes of int64[n] elements, each at its place in the element."""
        word, shift = self._places(positions)
        codes = self._codes(word, shift).to(self.bits)
        return (codes << (self.order * CODE_BITS).to(self.bits)).sum(1, dtype=self.bits)

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        """Overwrite the codes of int64[n] distinct elements with those of int[n]."""
        word, shift = self._places(positions)
        new = (bits[:, None] >> (self.order * CODE_BITS).to(bits.dtype)) & _MASK
        change = (new.to(torch.int32) - self._codes(word, shift)) << shift
        self.words.index_add_(0, word.view(-1), change.view(-1).to(self.words.dtype))

    def _places(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(int64, int32)[n, codes]: the word of each code, and where it begins there, in bits."""
        places = self.target.places(numbers)[:, None] + self.apart
        count = 2 * self.words.element_size()
        return places.div(count, rounding_mode="floor"), ((places % count) * CODE_BITS).int()

    def _codes(self, word: Tensor, shift: Tensor) -> Tensor:
        """int32[n, codes]: what is there."""
        words = self.words.index_select(0, word.view(-1)).view(word.shape)
        return (words.to(torch.int32) >> shift) & _MASK
