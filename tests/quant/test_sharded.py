"""Ranks of a trainer that quantize what they hold, and those that cannot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deltasync import ModuleTarget, WeightReceiver, WeightSender
from deltasync.delta.shard import ShardSpec, placed
from deltasync.errors import SyncAborted
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.served import ServedSource, served_weights
from deltasync.transports import inprocess
from tests.quant.test_served import engine
from tests.quant.test_two_forms import assert_holds
from tests.worlds.links import Serving
from tests.worlds.trainers import Sharded, Trainer

SHAPES = {"up": (512, 64), "down": (300, 128), "small": (128, 32)}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Module()
    for name, (rows, cols) in SHAPES.items():
        made.add_module(name, nn.Linear(cols, rows, bias=name == "up").bfloat16())
    return made


def forms(form: Form, name: str, shape: tuple[int, ...]) -> Form | None:
    return form if name.endswith("weight") else None


def held(ways: dict[str, list[int]], name: str, shape: tuple[int, ...], rank: int) -> ShardSpec:
    """Rows from one border to the next; all of them without borders."""
    borders = ways.get(name.partition(".")[0]) if len(shape) == 2 else None
    if borders is None:
        return ShardSpec.whole(shape)
    begin, end = borders[rank : rank + 2]
    return ShardSpec(shape, (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))


WAYS = [
    {"up": [0, 171, 512], "down": [0, 150, 300], "small": [0, 64, 128]},
    {"up": [0, 1, 512], "down": [0, 299, 300], "small": [0, 100, 128]},
    {"up": [0, 256, 512], "down": [0, 256, 300], "small": [0, 128, 128]},
    {"up": [0, 512, 512], "down": [0, 0, 300]},
    {"up": [0, 128, 512]},  # replicas of the others
]


@pytest.mark.promise(
    "Bits",
    "Ranks that quantize what they hold send what a gather would produce, also where blocks "
    "lie on several ranks.",
)
@settings(max_examples=20, deadline=None)
@given(
    ways=st.sampled_from(WAYS),
    form=st.sampled_from([BlockFp8(), BlockFp8("ue8m0"), Int4(32), CompressedNvfp4()]),
    shares=st.lists(st.sampled_from([0, 0.01, 0.5, 1]), min_size=1, max_size=3),
)
def test_ranks_send_what_a_gather_would_give(
    ways: dict[str, list[int]], form: Form, shares: list[float]
) -> None:
    source = model()
    parts = parts_of(source, ways)

    def cold() -> dict[str, torch.Tensor]:
        return dict(served_weights(source.state_dict().items(), lambda *a: forms(form, *a)))

    replica = engine(cold())
    trainer = Trainer([ServedSource(part, lambda *a: forms(form, *a)) for part in parts])
    try:
        trainer.add(replica)
        trainer.wait(1)
        trainer.send()
        assert_holds(replica, cold())
        for share in shares:
            for parameter in source.parameters():
                chosen = torch.rand(parameter.shape) < share
                parameter.data[chosen] *= -1.5
            for part in parts:
                part.step()
            trainer.send()
            assert_holds(replica, cold())
    finally:
        trainer.close()


def parts_of(source: nn.Module, ways: dict[str, list[int]]) -> list[Sharded]:
    shapes = {name: tuple(tensor.shape) for name, tensor in source.named_parameters()}
    boxes = [{n: held(ways, n, shape, rank) for n, shape in shapes.items()} for rank in range(2)]
    return [Sharded(source, one) for one in boxes]


@pytest.mark.parametrize("crosses", [False, True])
def test_ranks_exchange_maxima_only_where_blocks_cross(crosses: bool) -> None:
    source = model()
    parts = parts_of(source, WAYS[0] if crosses else WAYS[2])
    trainer = Trainer([ServedSource(part, lambda *a: forms(BlockFp8(), *a)) for part in parts])
    asked: list[str] = []
    trainer.hub.before = lambda order: asked.append(order.kind)
    weights = dict(served_weights(source.state_dict().items(), lambda *a: forms(BlockFp8(), *a)))
    try:
        trainer.add(engine(weights))
        trainer.wait(1)
        trainer.send()
        assert ("measure" in asked) == crosses
        asked.clear()
        trainer.send()
    finally:
        trainer.close()
    assert asked == ["measure"] * crosses + ["compare", "send", "decide", "done"]


@pytest.mark.promise(
    "Bits",
    "A rank that is lost while ranks agree on maxima ends the sync as a failure that the next "
    "one covers.",
)
def test_a_rank_whose_source_fails_as_maxima_are_exchanged_ends_the_sync() -> None:
    source = model()
    parts = parts_of(source, WAYS[0])
    trainer = Trainer([ServedSource(part, lambda *a: forms(BlockFp8(), *a)) for part in parts])
    weights = dict(served_weights(source.state_dict().items(), lambda *a: forms(BlockFp8(), *a)))
    replica = engine(weights)
    try:
        trainer.add(replica)
        trainer.wait(1)
        trainer.send()
        for failing in (0, 1):
            source.get_parameter("up.weight").data *= 1.5
            for part in parts:
                part.step()
            parts[failing].fails = RuntimeError("planted")
            outcomes = trainer.outcomes()
            assert "planted" in str(outcomes[failing])
            assert isinstance(outcomes[1 - failing], SyncAborted)
            assert_holds(replica, weights)
            parts[failing].fails = None
            trainer.settle(1)
            expected = served_weights(source.state_dict().items(), lambda *a: forms(BlockFp8(), *a))
            weights = dict(expected)
            assert_holds(replica, weights)
    finally:
        trainer.close()


def test_what_fsdp_cuts_evenly_is_as_before() -> None:
    boxes = [placed((512, 64), (4,), (rank,), [(0, 1)]) for rank in range(4)]
    for box in boxes:
        entries = ServedSource(
            Sharded(model(), {"up.weight": box}), lambda *_: BlockFp8()
        ).tensors()
        assert [entry.shape for entry in entries] == [(512, 64), (4, 1)]
        assert [entry.shard.size for entry in entries if entry.shard] == [(128, 64), (1, 1)]


def test_a_part_without_a_group_is_refused() -> None:
    box = ShardSpec((512, 64), (0, 0), (256, 64))
    source = ServedSource(Sharded(model(), {"up.weight": box}), lambda *_: BlockFp8())
    weight = torch.zeros(512, 64).bfloat16()
    replica = engine(dict(served_weights([("up.weight", weight)], lambda *_: BlockFp8())))
    transport = inprocess.Sender()
    with WeightSender(source, transport) as sender:
        serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
        try:
            sender.wait_for_receivers(1, timeout_s=10)
            with pytest.raises(SyncAborted, match="give the senders of all ranks a `group`"):
                sender.send_weights(timeout_s=5)
        finally:
            serving.stop()


def test_replicas_of_a_large_matrix_send_a_part_each() -> None:
    source = nn.Module()
    source.up = nn.Linear(1024, 2048, bias=False).bfloat16()
    box = {"up.weight": ShardSpec.whole((2048, 1024))}
    parts = [Sharded(source, box) for _ in range(3)]
    replica = engine(dict(served_weights(source.state_dict().items(), lambda *_: BlockFp8())))
    trainer = Trainer([ServedSource(part, lambda *_: BlockFp8()) for part in parts])
    try:
        trainer.add(replica)
        trainer.wait(1)
        for _ in range(2):
            trainer.send()
            expected = dict(served_weights(source.state_dict().items(), lambda *_: BlockFp8()))
            assert_holds(replica, expected)
            source.up.weight.data *= 1.01
            for part in parts:
                part.step()
    finally:
        trainer.close()
