"""Folding patches: as if they were applied one after another, and as the diff of the two ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from deltasync import apply_patch, diff, fold
from deltasync.delta import fold as folding
from deltasync.delta.bits import Flat, Run
from deltasync.delta.patch import Chunk, ChunkedPatch, DensePatch, Patch, SparsePatch, runs_of
from deltasync.delta.policy import Policy
from deltasync.errors import InvalidIndices, LayoutMismatch
from tests.worlds.strategies import SHAPES, mutations, policies, same_bits, tensors

SPARSE = Policy(dense_above=1.0)


@st.composite
def histories(draw: DrawFn) -> list[Tensor]:
    """Successive versions of one parameter; some return to earlier ones."""
    versions = [draw(tensors(shapes=SHAPES))]
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            versions.append(draw(mutations(versions[-1])))
        else:
            versions.append(draw(st.sampled_from(versions)))
    return versions


def deltas_of(versions: list[Tensor], chosen: list[Policy]) -> list[Patch | None]:
    pairs = zip(versions[1:], versions, chosen, strict=False)
    return [diff(old, new, name="w", policy=policy) for new, old, policy in pairs]


def applied(base: Tensor, patch: Patch | None) -> Tensor:
    result = base.clone(memory_format=torch.contiguous_format)
    if patch is not None:
        apply_patch(result, patch)
    return result


@given(histories(), st.lists(policies(), min_size=5, max_size=5), st.integers(0, 5))
@example([torch.zeros(4)] * 2, [SPARSE] * 5, 0)  # nothing folds to nothing
def test_a_fold_does_what_its_patches_do_one_after_another(
    versions: list[Tensor], chosen: list[Policy], cut: int
) -> None:
    """With the base or without it, and folded again."""
    base, end = versions[0], versions[-1]
    patches = deltas_of(versions, chosen)
    for folded in (
        fold(patches),
        fold(patches, base=base),
        fold([fold(patches[:cut]), fold(patches[cut:])]),
    ):
        assert same_bits(applied(base, folded), end)
        assert same_bits(applied(end, folded), end), "applying twice equals applying once"
    folded = fold(patches, base=base)
    assert (folded is None) == same_bits(base, end)
    for run in runs_of(folded) if folded is not None else []:
        assert run.bits is not None
        where = torch.arange(run.start, run.stop) if run.indices is None else run.positions()
        differs = Flat.of(base).gather(where) != run.bits
        assert differs.any() if run.indices is None else differs.all()


def test_without_the_base_what_ends_where_it_began_stays() -> None:
    base, other = torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 0.0])
    there, back = diff(base, other, policy=SPARSE), diff(other, base, policy=SPARSE)
    folded = fold([there, back])
    assert isinstance(folded, SparsePatch)
    assert folded.indices.tolist() == [1]
    assert fold([there, back], base=base) is None


def test_no_sparse_run_spans_more_than_an_index_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_SPARSE_SPAN", 10)
    one = [Run(0, 8, torch.tensor([1, 7], dtype=torch.int32), torch.tensor([1, 2]))]
    two = [Run(30, 5, torch.tensor([4], dtype=torch.int32), torch.tensor([3]))]
    found = folding.fold_runs([one, two], 35)
    assert [(r.start, r.span, r.positions().tolist()) for r in found] == [
        (0, 10, [1, 7]),
        (30, 5, [34]),
    ]


def test_patches_that_do_not_belong_together_are_refused() -> None:
    base = torch.zeros(4)
    patch = diff(base, torch.ones(4), name="a")
    other = diff(base, torch.ones(4), name="b")
    longer = diff(torch.zeros(5), torch.ones(5), name="a")
    wider = diff(base.double(), torch.ones(4).double(), name="a")
    for wrong in (other, longer, wider):
        with pytest.raises(LayoutMismatch, match="cannot be folded"):
            fold([patch, wrong])
    with pytest.raises(LayoutMismatch, match="cannot be folded"):
        fold([patch], base=torch.zeros(5))
    with pytest.raises(LayoutMismatch, match="without chunks"):
        fold([ChunkedPatch(name="a", shape=(4,), chunks=())])


@pytest.mark.parametrize("indices", [[1, 1], [2, 1], [-1, 0], [0, 4]])
def test_bad_indices_are_refused(indices: list[int]) -> None:
    where = torch.tensor(indices, dtype=torch.int32)
    bad = SparsePatch(name="a", shape=(4,), indices=where, values=torch.ones(2))
    good = DensePatch(name="a", shape=(4,), values=torch.ones(4))
    chunks = tuple(
        Chunk(start=start, numel=3, indices=None, values=torch.ones(3)) for start in (0, 1)
    )
    overlapping = ChunkedPatch(name="a", shape=(4,), chunks=chunks)
    cases: list[list[Patch]] = [[bad], [good, bad], [bad, good], [overlapping]]
    for patches in cases:
        with pytest.raises(InvalidIndices):
            fold(patches)
