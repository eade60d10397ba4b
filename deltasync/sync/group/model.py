"""What a trainer's ranks hold, as rank 0 knows it: plain data and arithmetic, no I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deltasync.delta.ledger import digest_text
from deltasync.delta.shard import ShardSpec, share_out
from deltasync.delta.snapshot import Digests
from deltasync.errors import MalformedMessage, ReplicasDiffer
from deltasync.sync.group import orders
from deltasync.sync.protocol.sender_session import Copies
from deltasync.sync.target.base import some_of
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec, entries, parameter_specs


def capture_order(
    declared: Sequence[orders.Declared],
    specs: tuple[ParameterSpec, ...],
    *,
    name: str,
    agreed: str,
) -> orders.Capture:
    """Share out what ranks hold, so that each element is sent once.

    Args:
        declared: By all ranks.
        specs: The layout.
        name, agreed: Of the order.
    """
    boxes = [one.boxes for one in declared]
    shares = share_out(boxes, {spec.name: spec.dtype.item_size for spec in specs})
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    parts = tuple(
        tuple((numbers[n], box.offset, box.size) for n, box in share.items() if box != own[n])
        for own, share in zip(boxes, shares, strict=True)
    )
    alike = np.zeros((len(boxes), len(specs)), np.uint64)
    holders = Counter(box for own in boxes for box in own.items())
    for rank, (own, share) in enumerate(zip(boxes, shares, strict=True)):
        alike[rank, [numbers[box[0]] for box in own.items() if holders[box] > 1]] = 1
        alike[rank, [numbers[name] for name in own.keys() - share.keys()]] = 2
    return orders.Capture(
        capture=name,
        parameters=entries(specs),
        shares=parts,
        alike=tuple(map(orders.runs_of, alike)),
        agreed=agreed,
    )


def share_of_rank(
    order: orders.Capture, rank: int, declared: orders.Declared
) -> tuple[tuple[ParameterSpec, ...], dict[str, ShardSpec]]:
    """The layout that an order names, and what a rank sends of it, by canonical name."""
    specs = parameter_specs(order.parameters)
    boxes = dict(declared.boxes)
    for number in np.flatnonzero(orders.copies_of(order.alike[rank], len(specs)) == 2).tolist():
        del boxes[specs[number].name]
    for number, offset, size in order.shares[rank]:
        name = specs[number].name
        boxes[name] = ShardSpec(boxes[name].shape, offset, size)
    return specs, boxes


def refuse_drifted(declared: Sequence[orders.Declared], found: Sequence[orders.Alike]) -> None:
    """Raise ReplicasDiffer, by name, if ranks have found other digests of what they hold alike."""
    holders = defaultdict[tuple[str, ShardSpec], dict[str, list[int]]](dict)
    for rank, digests in enumerate(found):
        for name, digest in digests:
            if (box := declared[rank].boxes.get(name)) is None:
                raise MalformedMessage(f"rank {rank} answers of {name!r}, which it does not hold")
            holders[name, box].setdefault(digest, []).append(rank)
    differ = {box[0]: list(ranks.values()) for box, ranks in holders.items() if len(ranks) > 1}
    if differ:
        apart = " and ".join(map(str, next(iter(differ.values()))))
        raise ReplicasDiffer(
            f"ranks {apart} have drifted apart, in {some_of(list(differ))} at least: seeds differ, "
            "or an all-reduce is missing; nothing was sent; broadcast the weights from one rank"
        )


def digests_told(
    held: Digests, asked: Sequence[orders.CopyRuns], num_parameters: int
) -> tuple[str, ...]:
    """A rank's answer: the digest of all that it holds, then the digests that were asked for."""
    copies = [None, *(orders.copies_of(runs, num_parameters) for runs in asked)]
    return tuple(digest_text(held.digest_of(one)) for one in copies)


@dataclass(frozen=True, slots=True)
class GroupDigests:
    """The digests that all ranks add up to.

    Attributes:
        own: Of rank 0.
        others: Of the other ranks together, by `key` of the copies.
    """

    own: Digests
    others: Mapping[bytes, int]

    @property
    def total(self) -> int:
        return self.digest_of(None)

    def digest_of(self, copies: Copies | None) -> int:
        """Of copies that the other ranks were asked about."""
        return (self.own.digest_of(copies) + self.others[key(copies)]) & MASK


def key(copies: Copies | None) -> bytes:
    """The key of copies in a dictionary."""
    return b"" if copies is None else copies.tobytes()


def digests_added(
    asked: Sequence[Copies],
    answers: Collection[orders.Found] | Collection[orders.Sent],
) -> dict[bytes, int]:
    """The sums of the digests that ranks have reported of all, and of these copies, by `key`.

    Raises MalformedMessage.
    """
    if any(len(answer.digests) != 1 + len(asked) for answer in answers):
        raise MalformedMessage(f"a rank has not answered with {1 + len(asked)} digests")
    return {
        key(copies): sum(int(answer.digests[place], 16) for answer in answers) & MASK
        for place, copies in enumerate([None, *asked])
    }
