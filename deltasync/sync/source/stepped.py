"""Whether what optimizers step is what a source sends."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from deltasync.delta.bits import has_storage
from deltasync.delta.shard import is_sharded, local_of
from deltasync.errors import ConfigError
from deltasync.sync.module import named_tensors
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.target.base import some_of

logger = logging.getLogger(__name__)


def check_stepped(optimizers: Sequence[torch.optim.Optimizer], source: WeightSource | None) -> None:
    """Log a warning that names what optimizers step and a source does not send.

    What has storage in common with something that is sent counts as sent. Raises ConfigError if
    nothing that they step is. Nothing is known of a source that has no `module`: it may compute
    what it sends.
    """
    module = getattr(source, "module", None)
    if source is None or module is None:
        return
    stepped = dict(_placed(_stepped(optimizers)))
    sent = {storage for _, (storage, _) in _placed(("", one.tensor) for one in source.tensors())}
    lacking = {name: place for name, place in stepped.items() if place[0] not in sent}
    if lacking and len(lacking) == len(stepped):
        raise ConfigError(
            f"none of the {len(stepped)} parameters that the optimizer steps are in the source, so "
            "engines would be stale, or one step late: give the source the model that is trained; "
            "if masters are copied into it, call sender.send_weights() after that instead"
        )
    if lacking:
        known = {place: name for name, place in _placed(named_tensors(module))}
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
            if one.requires_grad and (is_sharded(one) or has_storage(one)):
                yield f"{place} of group {number}, of shape {tuple(one.shape)}", one


def _placed(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """(address of the storage, address of the elements) of tensors that are in memory here."""
    for name, tensor in named:
        local = local_of(tensor) if is_sharded(tensor) else tensor
        if has_storage(local) and local.numel() and local.data_ptr():
            yield name, (local.untyped_storage().data_ptr(), local.data_ptr())
