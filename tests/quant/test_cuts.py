"""Ranks that hold boxes of matrices make together what one that holds all of them makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.shard import ShardSpec
from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp4 import MxFp4
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from deltasync.quant.served import ServedSource
from deltasync.sync.group.agreement import Agreement
from deltasync.sync.source.tensors import NamedTensor, Place, held_of, maxima_of
from tests.quant.kinds import KINDS, matrix

STEPS: Mapping[Form, int] = {
    BlockFp8(): 1,
    BlockFp8("ue8m0"): 1,
    BlockFp8(arithmetic="compressed-tensors"): 1,
    Fp8("channel"): 1,
    Fp8("tensor"): 1,
    Fp8("channel", "vllm"): 1,
    Fp8("tensor", "vllm"): 1,
    Int8(): 1,
    Int4(32): 8,
    Int4(64, "slime"): 8,
    Int4(None): 8,
    MxFp8(): 1,
    MxFp8("compressed-tensors"): 1,
    MxFp4(): 2,
    CompressedNvfp4(): 2,
    ModelOptNvfp4(): 2,
}
"""By form, columns whose codes are one element."""

Weights = Mapping[str, Tensor]
Boxes = Mapping[str, ShardSpec]


class Rank:
    """A source of what one rank holds."""

    def __init__(self, weights: Weights, boxes: Boxes) -> None:
        self._entries = [
            NamedTensor((name,), cut(weights[name], box).clone(), box)
            for name, box in boxes.items()
        ]

    def tensors(self) -> list[NamedTensor]:
        return self._entries


def cut(tensor: Tensor, box: ShardSpec) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))]


def together(weights: Weights, ranks: list[Boxes], form: Form) -> dict[str, Tensor]:
    """What all ranks serve, put together; it fails if one makes what another one makes too."""
    sources = [ServedSource(Rank(weights, boxes), lambda *_: form) for boxes in ranks]
    entries = [source.tensors() for source in sources]
    known = [maxima_of(one) for one in entries]
    declared = [[one.place for one in maxima.values()] for maxima in known]
    agreement = Agreement.of(declared)
    found = [agreement.found(*one) for one in zip(declared, known, strict=True)]
    agreed = agreement.largest([agreement.positions(one) for one in declared], found)
    made: dict[str, Tensor] = {}
    for rank, maxima in zip(entries, known, strict=True):
        agreement.give(agreed, maxima)
        for entry in rank:
            put(made, entry)
    return made


def put(made: dict[str, Tensor], entry: NamedTensor) -> None:
    assert entry.computed is not None
    box = held_of(entry)[0]
    bits = entry.computed.read(0, entry.computed.numel).view(box.size)
    there = made.setdefault(entry.name, torch.zeros(entry.shape, dtype=bits.dtype))
    cut(there, box).copy_(bits)


def alone(weights: Weights, form: Form) -> dict[str, Tensor]:
    """The same of one rank, NaN and infinity included."""
    whole = {name: ShardSpec.whole(tensor.shape) for name, tensor in weights.items()}
    entries = ServedSource(Rank(weights, whole), lambda *_: form).tensors()
    made: dict[str, Tensor] = {}
    for entry in entries:
        put(made, entry)
    return made


def grid(shape: tuple[int, ...], rows: list[int], cols: list[int]) -> Iterator[ShardSpec]:
    """Boxes between borders."""
    for (top, bottom), (left, right) in product(pairwise(rows), pairwise(cols)):
        yield ShardSpec(shape, (top, left), (bottom - top, right - left))


@st.composite
def borders(draw: st.DrawFn, length: int, step: int) -> list[int]:
    inner = st.lists(st.integers(0, length // step).map(step.__mul__), max_size=3)
    return sorted([0, *draw(inner), length])


@pytest.mark.promise(
    "Bits",
    "Ranks that quantize what they hold send what a gather would produce, also where blocks "
    "lie on several ranks.",
)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), form=st.sampled_from(list(STEPS)), kind=st.sampled_from(KINDS))
def test_boxes_are_served_as_the_whole(data: st.DataObject, form: Form, kind: str) -> None:
    unit = 1 if isinstance(form, BlockFp8) else form.cols or 1
    rows = data.draw(st.integers(1, 300), label="rows")
    cols = unit * data.draw(st.integers(1, max(2, 300 // unit)), label="columns")
    weight = matrix(kind, (rows, cols), data.draw(st.integers(0, 9), label="seed"))
    tops = data.draw(borders(rows, 1), label="tops")
    lefts = data.draw(borders(cols, STEPS[form]), label="lefts")
    ranks: list[Boxes] = [{"a.weight": box} for box in grid((rows, cols), tops, lefts)]
    made, expected = together({"a.weight": weight}, ranks, form), alone({"a.weight": weight}, form)
    assert made.keys() == expected.keys()
    for name, bits in expected.items():
        assert torch.equal(made[name], bits), name


@pytest.mark.parametrize("form", [CompressedNvfp4(), ModelOptNvfp4(), Fp8("tensor")])
@pytest.mark.parametrize("ways", [[0, 48, 48], [0, 17, 48]])
def test_ranks_that_hold_one_each_of_what_shares_a_scale_agree(form: Form, ways: list[int]) -> None:
    """As FSDP of two ranks holds fused gate and up, which `name_map` splits."""
    names = ["gate_proj.weight", "up_proj.weight", "o_proj.weight"]
    weights = {name: matrix("usual", (48, 64), seed) for seed, name in enumerate(names)}
    first, second = grid((48, 64), ways, [0, 64])
    ranks: list[Boxes] = [
        dict(zip(names, boxes, strict=True))
        for boxes in ((first, second, first), (second, first, second))
    ]
    made, expected = together(weights, ranks, form), alone(weights, form)
    for name, bits in expected.items():
        assert torch.equal(made[name], bits), name


def test_whole_matrices_of_siblings_on_several_ranks_agree() -> None:
    """As pipeline or expert parallel ranks hold them: whole, without a shard."""
    names = ["gate_proj.weight", "up_proj.weight"]
    weights = {name: matrix("usual", (48, 64), seed) for seed, name in enumerate(names)}
    ranks: list[Boxes] = [{name: ShardSpec.whole((48, 64))} for name in names]
    made = together(weights, ranks, CompressedNvfp4())
    for name, bits in alone(weights, CompressedNvfp4()).items():
        assert torch.equal(made[name], bits), name


def test_only_what_crosses_is_agreed_on() -> None:
    weights = {"a.weight": torch.ones(512, 256)}

    def declared(rows: list[int], cols: list[int]) -> list[list[Place]]:
        ranks = [Rank(weights, {"a.weight": box}) for box in grid((512, 256), rows, cols)]
        sources = [ServedSource(rank, lambda *_: BlockFp8()) for rank in ranks]
        return [[one.place for one in maxima_of(s.tensors()).values()] for s in sources]

    uneven = declared([0, 200, 512], [0, 256])
    assert Agreement.of(uneven).runs == (("a.weight/rows/1", 2),)
    assert declared([0, 256, 512], [0, 128, 256]) == [[]] * 4


@pytest.mark.parametrize("form", [Int4(32), Int4(None), MxFp4(), CompressedNvfp4()])
def test_ranks_that_share_an_element_of_codes_are_refused(form: Form) -> None:
    box = ShardSpec((32, 64), (0, 0), (32, 33))
    source = ServedSource(
        Rank({"a.weight": torch.ones(32, 64)}, {"a.weight": box}), lambda *_: form
    )
    with pytest.raises(ConfigError, match=r"a\.weight: .* columns in one element"):
        source.tensors()


def test_blocks_that_are_padded_with_another_ranks_element_are_refused() -> None:
    form = BlockFp8(arithmetic="nemo-rl")
    for shape, is_refused in (((300, 128), True), ((256, 200), True), ((256, 128), False)):
        box = ShardSpec(shape, (0, 0), (100, shape[1]))
        rank = Rank({"a.weight": torch.ones(shape)}, {"a.weight": box})
        source = ServedSource(rank, lambda *_: form)
        if not is_refused:
            assert len(source.tensors()) == 2
            continue
        with pytest.raises(ConfigError, match=r"a\.weight: .* last element"):
            source.tensors()


def test_what_ranks_have_not_agreed_on_is_not_read() -> None:
    for form in (BlockFp8(), CompressedNvfp4()):
        rank = Rank(
            {"a.weight": torch.ones(256, 64)}, {"a.weight": ShardSpec((256, 64), (0, 0), (100, 64))}
        )
        source = ServedSource(rank, lambda *_: form)  # noqa: B023
        (entry, *_) = source.tensors()
        assert entry.computed is not None
        with pytest.raises(ConfigError, match="not agreed"):
            entry.computed.read(0, 1)
        for one in maxima_of([entry]).values():
            one.agree(torch.ones(one.place.count, dtype=torch.bfloat16))
        entry.computed.read(0, 1)
        source.tensors()  # the trainer has made a step
        with pytest.raises(ConfigError, match="not agreed"):
            entry.computed.read(0, 1)
