"""Ranks of a trainer that quantize what they hold, and those that cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deltasync.delta.shard import ShardSpec
from deltasync.errors import ConfigError, SyncAborted
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from deltasync.quant.served import ServedSource, served_weights
from tests.quant.kinds import FINITE, matrix
from tests.quant.served import assert_holds, engine
from tests.worlds.links import fleet
from tests.worlds.trainers import Sharded, Trainer

STEPS: Mapping[Form, int] = {
    BlockFp8(): 1,
    BlockFp8("ue8m0"): 1,
    BlockFp8("bfloat16"): 1,
    Fp8("channel"): 1,
    Fp8("tensor"): 1,
    Int8(): 1,
    Int4(32): 8,
    Int4(64): 8,
    Int4(None): 8,
    MxFp8(): 1,
    CompressedNvfp4(): 2,
    ModelOptNvfp4(): 2,
}
"""By form, columns whose codes are one element."""


SHAPES = {"gate_proj": (288, 64), "up_proj": (288, 64), "down_proj": (160, 320), "o_proj": (48, 64)}
Boxes = dict[str, ShardSpec]


def model(kinds: tuple[str, ...] = ("usual",)) -> nn.Module:
    made = nn.Module()
    for seed, (name, (rows, cols)) in enumerate(SHAPES.items()):
        layer = nn.Linear(cols, rows, bias=name == "o_proj").bfloat16()
        layer.weight.data = matrix(kinds[seed % len(kinds)], (rows, cols), seed)
        made.add_module(name, layer)
    return made


def named(form: Form, name: str, shape: tuple[int, ...]) -> Form | None:
    return form if name.endswith("weight") else None


def boxes(name: str, shape: tuple[int, ...], borders: tuple[list[int], list[int]]) -> list[Boxes]:
    """What each rank holds of a matrix between borders of rows and of columns."""
    return [
        {name: ShardSpec(shape, (top, left), (bottom - top, right - left))}
        for (top, bottom), (left, right) in product(pairwise(borders[0]), pairwise(borders[1]))
    ]


@st.composite
def cut(draw: st.DrawFn, form: Form) -> list[Boxes]:
    """Each matrix is cut anywhere that codes allow, or whole on one rank or on all."""
    world = draw(st.sampled_from([2, 3, 4]))
    found: list[Boxes] = [{"o_proj.bias": ShardSpec.whole((48,))} for _ in range(world)]
    for layer, (rows, cols) in SHAPES.items():
        name = f"{layer}.weight"
        way = draw(st.sampled_from(["rows", "columns", "both", "replicas", "one"]))
        if way in ("replicas", "one"):
            whole = ShardSpec.whole((rows, cols))
            for held in found if way == "replicas" else [draw(st.sampled_from(found))]:
                held[name] = whole
            continue
        ways = (
            (2, 2)
            if way == "both" and world == 4
            else (1, world)
            if way == "columns"
            else (world, 1)
        )
        inner = [
            sorted(
                step * n
                for n in draw(
                    st.lists(st.integers(0, size // step), min_size=k - 1, max_size=k - 1)
                )
            )
            for k, size, step in ((ways[0], rows, 1), (ways[1], cols, STEPS[form]))
        ]
        borders = [0, *inner[0], rows], [0, *inner[1], cols]
        for held, box in zip(found, boxes(name, (rows, cols), borders), strict=True):
            held |= box
    return found


@pytest.mark.promise(
    "Bits",
    "Ranks that quantize what they hold send what a gather would produce, also where blocks "
    "lie on several ranks.",
)
@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    form=st.sampled_from(list(STEPS)),
    kinds=st.lists(st.sampled_from([k for k in FINITE if k != "zero"]), min_size=1, max_size=4),
)
def test_ranks_send_what_a_gather_would_give(
    data: st.DataObject, form: Form, kinds: list[str]
) -> None:
    with following(model(tuple(kinds)), data.draw(cut(form)), form) as here:
        for share in data.draw(st.lists(st.sampled_from([0, 0.01, 1]), min_size=1, max_size=2)):
            for parameter in here.source.parameters():
                chosen = torch.rand(parameter.shape) < share
                parameter.data[chosen] *= -0.75
            here.sync()


class Following:
    """A trainer of several ranks that quantize, and an engine that follows."""

    def __init__(self, source: nn.Module, ways: list[Boxes], form: Form) -> None:
        self.source, self.parts = source, [Sharded(source, one) for one in ways]
        self._forms = lambda *given: named(form, *given)
        self.trainer = Trainer([ServedSource(part, self._forms) for part in self.parts])
        self.replica = engine(self.cold())

    def cold(self) -> dict[str, torch.Tensor]:
        return dict(served_weights(self.source.state_dict().items(), self._forms))

    def sync(self) -> None:
        for part in self.parts:
            part.step()
        self.trainer.send(timeout_s=60)
        assert_holds(self.replica, self.cold())


@contextmanager
def following(source: nn.Module, ways: list[Boxes], form: Form) -> Iterator[Following]:
    here = Following(source, ways, form)
    try:
        here.trainer.add(here.replica)
        here.trainer.wait(1)
        here.sync()
        yield here
    finally:
        here.trainer.close()


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A rank that fails while ranks agree on maxima ends the sync, and the next one covers it.",
)
def test_a_rank_whose_source_fails_as_maxima_are_exchanged_ends_the_sync() -> None:
    alike = {f"{layer}.weight": ShardSpec.whole(shape) for layer, shape in SHAPES.items()}
    alike["o_proj.bias"] = ShardSpec.whole((48,))
    halves = boxes("up_proj.weight", SHAPES["up_proj"], ([0, 150, 288], [0, 64]))
    with following(model(), [alike | half for half in halves], BlockFp8()) as here:
        for failing in (0, 1):
            before = here.cold()
            here.source.get_parameter("up_proj.weight").data *= 1.5
            for part in here.parts:
                part.step()
            here.parts[failing].fails = RuntimeError("planted")
            outcomes = here.trainer.outcomes(timeout_s=30)
            assert "planted" in str(outcomes[failing])
            assert isinstance(outcomes[1 - failing], SyncAborted)
            assert_holds(here.replica, before)
            here.parts[failing].fails = None
            here.trainer.settle(1)
            assert_holds(here.replica, here.cold())


def test_a_part_without_a_group_is_refused() -> None:
    box = {"up_proj.weight": ShardSpec((288, 64), (0, 0), (256, 64))}
    source = ServedSource(Sharded(model(), box), lambda *_: BlockFp8())
    weight = [("up_proj.weight", torch.zeros(288, 64).bfloat16())]
    with fleet(source) as here:
        here.add(engine(dict(served_weights(weight, lambda *_: BlockFp8()))))
        here.wait(1)
        with pytest.raises(SyncAborted, match="give the senders of all ranks a `group`"):
            here.sender.send_weights(timeout_s=60)


@pytest.mark.parametrize("form", [Int4(32), CompressedNvfp4()], ids=str)
def test_ranks_that_share_an_element_of_codes_are_refused(form: Form) -> None:
    whole = nn.ModuleDict({"a": nn.Linear(64, 32, bias=False).bfloat16()})
    rank = Sharded(whole, {"a.weight": ShardSpec((32, 64), (0, 0), (32, 33))})
    with pytest.raises(ConfigError, match=r"a\.weight: .* columns in one element"):
        ServedSource(rank, lambda *_: form).tensors()
