"""The ledger of digests: one number for each chunk of tiles, kept up to date from changes."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.tiles import Ints, Space
from deltasync.wire.digest import MASK


def digest_text(digest: int) -> str:
    """A 64-bit digest as messages have it and people read it: 16 hexadecimal digits."""
    return f"{digest:016x}"


class Ledger:
    """State digests of what a space has, by chunk of tiles.

    Args:
        space: What is digested.
        sums: The digests. None for 0.

    Attributes:
        space: The same.
        sums: uint64[chunks].
    """

    def __init__(self, space: Space, sums: NDArray[np.uint64] | None = None) -> None:
        self.space = space
        self.sums = np.zeros(space.num_chunks, np.uint64) if sums is None else sums

    @property
    def total(self) -> int:
        """The digest of everything."""
        return int(self.sums.sum()) & MASK

    @property
    def share(self) -> Ints:
        """int64[chunks]: the share that each is a part of, in the order of the space."""
        return np.repeat(np.arange(len(self.space.shares)), np.diff(self.space.first_chunk))

    def parameter_of(self, chunks: Ints) -> Ints:
        """int64[n]: numbers of the layout's parameters of int64[n] chunks."""
        found: Ints = self.space.parameter[self.share[chunks]]
        return found

    def by_share(self) -> NDArray[np.uint64]:
        """uint64[shares]: the digest of each, in the order in which they were given."""
        found = np.zeros(len(self.space.shares), np.uint64)
        np.add.at(found, self.space.order[self.share], self.sums)
        return found

    def digest_of(self, copies: NDArray[np.uint64] | None) -> int:
        """The digest of so many copies of each parameter; None for one of each.

        Args:
            copies: uint64[parameters of the layout].
        """
        if copies is None:
            return self.total
        each = copies[self.space.parameter[self.share]]
        return int((each * self.sums).sum()) & MASK

    def changed_since(self, before: Self) -> set[int]:
        """Numbers of the layout's parameters of which a chunk is another."""
        return set(self.parameter_of(np.flatnonzero(self.sums != before.sums)).tolist())
