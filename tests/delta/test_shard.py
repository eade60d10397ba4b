"""Where the elements of a shard lie in the checkpoint tensor."""

from __future__ import annotations

import os
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.shard import (
    ShardSpec,
    placed,
    shard_of,
    share_out,
)
from deltasync.errors import ConfigError
from tests.delta.shards import positions_of
from tests.worlds.ranks import free_port, run_ranks

SIZES = st.integers(0, 9)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


def chunk(tensor: Tensor, ways: int, dim: int, index: int) -> Tensor:
    """As torch cuts: a rank beyond the last chunk has nothing."""
    chunks = tensor.chunk(ways, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def assert_is(spec: ShardSpec, expected: Tensor) -> None:
    assert spec.numel == expected.numel()
    if not spec.numel:
        return
    assert spec.size == expected.shape
    here = torch.arange(spec.numel)
    assert torch.equal(positions_of(spec, here), expected.reshape(-1))
    assert (positions_of(spec, here).diff() > 0).all()


@given(
    shape=st.lists(SIZES, min_size=1, max_size=3).map(tuple),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_shards_of_shards_are_cut_from_left_to_right(
    shape: tuple[int, ...], mesh: list[int], data: st.DataObject
) -> None:
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    splits = [None if dim is None else (dim, 1) for dim in dims]
    for coordinate in product(*map(range, mesh)):
        held = numbered(shape)
        for dim, ways, index in zip(dims, mesh, coordinate, strict=True):
            held = held if dim is None else chunk(held, ways, dim, index)
        assert_is(placed(shape, mesh, coordinate, splits), held)


@given(data=st.data(), world=st.integers(1, 6), split_above=st.sampled_from([0, 40, 1 << 20]))
def test_everything_is_sent_once_and_by_whom_holds_it(
    data: st.DataObject, world: int, split_above: int
) -> None:
    held: list[dict[str, ShardSpec]] = [{} for _ in range(world)]
    shapes = data.draw(st.lists(st.lists(SIZES, max_size=3).map(tuple), max_size=6))
    for number, shape in enumerate(shapes):
        ways = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
        split = (data.draw(st.integers(0, len(shape) - 1)), 1) if shape else None
        for rank in range(world):
            spec = placed(shape, (ways,), (rank % ways,), [split])
            held[rank][str(number)] = spec
    sizes = {str(number): 2 for number in range(len(shapes))}
    shares = share_out(held, sizes, split_above=split_above)
    for number, shape in enumerate(shapes):
        count = torch.zeros(prod(shape), dtype=torch.int64)
        for own, share in zip(held, shares, strict=True):
            if (sent := share.get(str(number))) is not None:
                positions = positions_of(sent, torch.arange(sent.numel))
                count[positions] += 1
                here = own[str(number)]
                assert torch.isin(positions, positions_of(here, torch.arange(here.numel))).all()
        assert (count == 1).all()


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
