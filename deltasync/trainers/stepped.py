"""Whether what optimizers step is what a source sends."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count

import torch
from torch import Tensor, nn

from deltasync.delta.bits import has_storage
from deltasync.delta.region import Region
from deltasync.delta.shard import is_sharded, local_of
from deltasync.errors import ConfigError
from deltasync.sync.module import named_tensors
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.target.base import some_of

logger = logging.getLogger(__name__)


def check_stepped(optimizers: Sequence[torch.optim.Optimizer], source: WeightSource | None) -> None:
    """Log a warning that names what optimizers step and a source does not send.

    Raises ConfigError if that is all they step. Nothing is known of a source that has no `module`:
    it may compute what it sends.
    """
    module = getattr(source, "module", None)
    if source is None or module is None:
        return
    stepped = dict(_placed(_stepped(optimizers)))
    sent = sorted(span for _, span in _placed(("", one.tensor) for one in source.tensors()))
    begins, ends = [begin for begin, _ in sent], list(accumulate((end for _, end in sent), max))
    before = {name: bisect_left(begins, end) for name, (_, end) in stepped.items()}
    lacking = {n: at for n, at in stepped.items() if not before[n] or ends[before[n] - 1] <= at[0]}
    if lacking and len(lacking) == len(stepped):
        raise ConfigError(
            f"none of the {len(stepped)} parameters that the optimizer steps are in the source, so "
            "engines would be stale, or one step late: give the source the model that is trained; "
            "if masters are copied into it, call sender.send_weights() after that instead"
        )
    if lacking:
        known = {span: name for name, span in _placed(named_tensors(module))}
        logger.warning(
            "%d of the %d parameters that the optimizer steps are not sent: %s. If engines have "
            "them, look at `rename`, `leave_out` and the source's module; if they are masters, "
            "call sender.send_weights() after they are copied into it, instead of this hook",
            *(len(lacking), len(stepped), some_of([known.get(lacking[n], n) for n in lacking])),
        )


def _stepped(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """The name, or the place, and the tensor of each parameter that steps may change."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        for place, one in zip(group.get("param_names", count()), group["params"], strict=False):
            is_frozen = isinstance(one, nn.Parameter) and not one.requires_grad  # masters are none
            if not is_frozen and (is_sharded(one) or has_storage(one)):
                yield f"{place} of group {number}, of shape {tuple(one.shape)}", one


def _placed(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Between which addresses the elements of tensors lie that are in memory here."""
    for name, tensor in named:
        local = local_of(tensor) if is_sharded(tensor) else tensor
        if has_storage(local) and local.numel() and local.data_ptr():
            region = Region.of_bytes(local)
            yield name, (region.start, region.stop)
