"""What several ranks hold alike: digests show whether they still do.

Each element is sent by one of them, so that engines would get a mixture if ranks drifted apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from deltasync.delta.digests import DigestLedger, digest_text
from deltasync.delta.shard import ShardSpec
from deltasync.errors import ReplicasDiffer
from deltasync.sync.group import orders
from deltasync.sync.source.weights import Agree, OwnWeights, SourceLayout
from deltasync.sync.target.base import some_of
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec

_CHUNK_NUMEL = 1 << 22
_CHUNKS_AT_ONCE = 16  # about, of a warm sync

Boxes = Mapping[str, ShardSpec]


class Replicas:
    """The parameters that this rank and others hold alike.

    Args:
        weights: What this rank compares and sends, as captured.
        boxes: What it holds of each parameter.
        alike: Which of these others hold too: those that have a copy in it.
        agree: As of `SourceLayout`.
    """

    def __init__(
        self,
        weights: OwnWeights,
        boxes: Boxes,
        alike: orders.CopyRuns,
        agree: Agree,
    ) -> None:
        assert weights.layout is not None
        self._weights, specs = weights, weights.layout.specs
        names = [specs[number].name for number in np.flatnonzero(orders.copies_of(alike))]
        here = {name: boxes[name] for name in names}
        self._layout = SourceLayout(weights.source, specs, here, agree)
        self._ledger = DigestLedger(self._layout.sent, chunk_numel=_CHUNK_NUMEL)
        chunks = sum(-(-spec.numel // _CHUNK_NUMEL) for spec in specs)  # the same on all ranks
        self._parts = -(-chunks // _CHUNKS_AT_ONCE)

    def digests(self, part: int | None = None) -> orders.Alike:
        """Of the weights as they were looked up last: of all, or of a part that `part` chooses."""
        assert self._weights.layout is not None
        self._layout.read(self._weights.layout.tensors)
        table, numbers, found = self._ledger.table, self._ledger.numbers, Counter[int]()
        turns = numbers[table.parameter] + table.start // _CHUNK_NUMEL - (part or 0)
        for chunk in np.flatnonzero(turns % (1 if part is None else self._parts) == 0).tolist():
            place, start = int(table.parameter[chunk]), int(table.start[chunk])
            bits = self._layout.readers[place].read(start, start + int(table.numel[chunk]))
            found[int(numbers[place])] += self._ledger.digest_run(place, bits, start)
        return tuple((number, digest_text(digest & MASK)) for number, digest in found.items())


def refuse_drifted(
    specs: Sequence[ParameterSpec], held: Sequence[Boxes], found: Mapping[int, orders.Alike]
) -> None:
    """Raise ReplicasDiffer if ranks that hold the same of a parameter have other digests of it.

    Args:
        specs: The layout.
        held: What each rank holds.
        found: Digests by rank.
    """
    holders = defaultdict[tuple[str, ShardSpec], dict[str, list[int]]](dict)
    for rank, digests in sorted(found.items()):
        for number, digest in digests:
            name = specs[number].name
            holders[name, held[rank][name]].setdefault(digest, []).append(rank)
    differ = {box[0]: list(ranks.values()) for box, ranks in holders.items() if len(ranks) > 1}
    if differ:
        apart = " and ".join(map(str, next(iter(differ.values()))))
        raise ReplicasDiffer(
            f"ranks {apart} of the trainer hold other values of {some_of(list(differ))} at least, "
            "which they should hold alike: a reduction is missing, or seeds differ; nothing was "
            "sent; broadcast the weights from one rank"
        )
