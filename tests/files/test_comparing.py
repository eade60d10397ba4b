"""Checkpoints compared piece by piece: the same as compared whole."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.files import comparing
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import compare_checkpoints
from deltasync.files.sparsity import sparsity
from tests.files.saved import save
from tests.worlds.strategies import models, mutations


@given(data=st.data(), old=models(), piece_bytes=st.sampled_from([8, 24, 1 << 20]))
def test_pieces_make_the_whole(
    data: st.DataObject, old: dict[str, Tensor], piece_bytes: int
) -> None:
    new = {name: data.draw(mutations(tensor)) for name, tensor in old.items()}
    done: list[int] = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(comparing, "_PIECE_BYTES", piece_bytes)
        patched.setattr(comparing, "_RELEASED", 2)
        before = Checkpoint(save(old, Path(folder) / "old"))
        after = Checkpoint(save(dict(reversed(new.items())), Path(folder) / "new"))
        found = compare_checkpoints(before, after, encodings=False, advance=done.append)
    assert sum(done) == before.num_bytes
    for name, one in found.items():
        whole = sparsity(old[name], new[name], encodings=False)
        assert (one.numel, one.changed) == (whole.numel, whole.changed)
        assert np.array_equal(one.steps, whole.steps)
