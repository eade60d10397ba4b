"""Merged changes of one parameter: as if they were written one after another."""

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
from deltasync.store import merged
from deltasync.store.merged import Overlay
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


@given(histories(), st.lists(st.just(SPARSE) | policies(), min_size=5, max_size=5))
@example([torch.zeros(4)] * 2, [SPARSE] * 5)  # nothing merges to nothing
@example([torch.zeros(4), torch.ones(4), torch.eye(4)[0], torch.zeros(4)], [SPARSE] * 5)
@example([torch.zeros(4), torch.ones(4), torch.eye(4)[0]], [Policy(dense_above=0.0), SPARSE] * 3)
def test_an_overlay_is_what_patches_make_one_after_another(
    versions: list[Tensor], chosen: list[Policy]
) -> None:
    """Also read in parts, by which later patches are decoded."""
    numel = versions[0].numel()
    base = Flat.of(versions[0])
    overlay, cut = Overlay.over(base, numel), numel // 2
    for old, new, policy in zip(versions, versions[1:], chosen, strict=False):
        if (patch := diff(old, new, name="w", policy=policy)) is not None:
            overlay = overlay.then([run for run in runs_of(patch) if run.count])
        wanted = Flat.of(new)
        assert torch.equal(overlay.read(0, numel), wanted.read(0, numel))
        assert torch.equal(overlay.read(cut, numel), wanted.read(cut, numel))
        places = torch.arange(numel).flip(0)[::2]
        assert torch.equal(overlay.gather(places), wanted.gather(places))
        for start in (versions[0], new):
            assert same_bits(written(start, overlay.runs()), new)


def test_no_sparse_run_spans_more_than_an_index_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "MAX_SPARSE_SPAN", 10)
    overlay = Overlay.over(Flat.of(torch.zeros(35, dtype=torch.int64)), 35)
    one = [Run(0, 8, torch.tensor([1, 7], dtype=torch.int32), torch.tensor([1, 2]))]
    two = [Run(30, 5, torch.tensor([4], dtype=torch.int32), torch.tensor([3]))]
    found = overlay.then(one).then(two).runs()
    assert [(r.start, r.span, r.positions().tolist()) for r in found] == [
        (0, 10, [1, 7]),
        (30, 5, [34]),
    ]
