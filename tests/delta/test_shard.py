"""Who sends what ranks hold, and what is no shard."""

from __future__ import annotations

import os

import pytest
import torch

from deltasync.delta.shard import ShardSpec, shard_of, share_out
from deltasync.errors import ConfigError
from tests.worlds.ranks import free_port, run_ranks


def test_replicas_share_the_work() -> None:
    specs = {f"layer{number}": ShardSpec.whole((8, 100)) for number in range(2)}
    specs |= {f"norm{number}": ShardSpec.whole((100,)) for number in range(8)}
    shares = share_out([specs] * 4, dict.fromkeys(specs, 2), split_above=1000)
    assert [sum(box.numel for box in share.values()) for share in shares] == [600] * 4


def test_ranks_that_leave_gaps_or_disagree_are_refused() -> None:
    top, bottom = ShardSpec((4, 2), (0, 0), (2, 2)), ShardSpec((4, 2), (2, 0), (2, 2))
    assert share_out([{"w": top}, {"w": bottom}], {"w": 2}) == [{"w": top}, {"w": bottom}]
    for other in ({}, {"w": ShardSpec((4, 2), (1, 0), (3, 2))}, {"w": ShardSpec.whole((2, 2))}):
        with pytest.raises(ConfigError, match="'w' among them, are not whole together"):
            share_out([{"w": top}, other], {"w": 2})


def test_sums_that_were_not_made_are_refused() -> None:
    run_ranks(refuse_sums, 1, free_port())


def refuse_sums(rank: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=1)
    mesh, local = init_device_mesh("cpu", (1,)), torch.zeros(3)
    assert shard_of(DTensor.from_local(local, mesh, [Shard(0)])) == ShardSpec.whole((3,))
    with pytest.raises(ConfigError, match="a sum that was not made"):
        shard_of(DTensor.from_local(local, mesh, [Partial()]))
    os._exit(0)  # at times torch aborts the process when it destroys groups of gloo
