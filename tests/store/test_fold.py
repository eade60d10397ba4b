"""Folding changes of one parameter: as if they were written one after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import diff
from deltasync.delta.bits import Flat, Run
from deltasync.delta.patch import check_runs, runs_of
from deltasync.delta.policy import Policy
from deltasync.store import fold as folding
from deltasync.store.fold import fold_runs
from tests.worlds.strategies import SHAPES, mutations, policies, same_bits, tensors

SPARSE = Policy(dense_above=1.0)


@st.composite
def histories(draw: st.DrawFn) -> list[Tensor]:
    """Successive versions of one parameter; some return to earlier ones."""
    versions = [draw(tensors(shapes=SHAPES))]
    for _ in range(draw(st.integers(2, 5))):
        if draw(st.booleans()):
            versions.append(draw(mutations(versions[-1])))
        else:
            versions.append(draw(st.sampled_from(versions)))
    return versions


def written(base: Tensor, runs: list[Run]) -> Tensor:
    result = base.clone(memory_format=torch.contiguous_format)
    flat = Flat.of(result)
    check_runs(runs, numel=flat.numel, name="w")
    for run in runs:
        assert run.bits is not None
        run.write(flat, run.bits)
    return result


@given(
    histories(),
    st.lists(st.just(SPARSE) | policies(), min_size=5, max_size=5),
    st.integers(0, 5),
)
@example([torch.zeros(4)] * 2, [SPARSE] * 5, 0)  # nothing folds to nothing
@example([torch.zeros(4), torch.ones(4), torch.eye(4)[0], torch.zeros(4)], [SPARSE] * 5, 1)
def test_a_fold_does_what_its_patches_do_one_after_another(
    versions: list[Tensor], chosen: list[Policy], cut: int
) -> None:
    """Also folded again."""
    base, end, numel = versions[0], versions[-1], versions[0].numel()
    pairs = zip(versions, versions[1:], chosen, strict=False)
    patches = [diff(old, new, name="w", policy=policy) for old, new, policy in pairs]
    deltas = [[] if patch is None else runs_of(patch) for patch in patches]
    parts = [fold_runs(part, numel) for part in (deltas[:cut], deltas[cut:])]
    for folded in (fold_runs(deltas, numel), fold_runs(parts, numel)):
        assert same_bits(written(base, folded), end)
        assert same_bits(written(end, folded), end), "applying twice equals applying once"


def test_no_sparse_run_spans_more_than_an_index_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_SPARSE_SPAN", 10)
    one = [Run(0, 8, torch.tensor([1, 7], dtype=torch.int32), torch.tensor([1, 2]))]
    two = [Run(30, 5, torch.tensor([4], dtype=torch.int32), torch.tensor([3]))]
    found = fold_runs([one, two], 35)
    assert [(r.start, r.span, r.positions().tolist()) for r in found] == [
        (0, 10, [1, 7]),
        (30, 5, [34]),
    ]
