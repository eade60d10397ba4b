"""vLLM's own sparse transfer takes what deltasync finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltasync import Policy, diff
from deltasync.integrations.vllm_patches import to_vllm_patches
from tests.engines.checkpoints import changed, checkpoint, write_config
from tests.engines.models import vllm_models
from tests.engines.test_vllm_models import assert_as_loaded
from tests.ranks import run_ranks


def follow(_: int, folder: Path) -> None:
    from vllm.distributed.weight_transfer import sparse_nccl_engine as sparse
    from vllm.model_executor.model_loader import checkpoint_weight_patch as own

    before = checkpoint(folder, 0)
    weights = changed(before, 0.1, seed=1)
    found = (diff(weights[n], before[n], name=n, policy=Policy(chunk_numel=500)) for n in weights)
    patches = list(to_vllm_patches(patch for patch in found if patch is not None))
    for patch in patches:
        sparse.SparseNCCLTrainerWeightTransferEngine._validate_patch(patch)
    with vllm_models(folder, 2) as (model, fresh):
        model.load_weights(iter(before.items()))
        received = [
            own.CheckpointWeightPatch(p.name, p.full_shape, p.values.dtype, p.values, p.indices)
            for p in patches
        ]
        own.load_checkpoint_weight_patches(model, received)
        assert_as_loaded(model, fresh, weights)


@pytest.mark.timeout(300)
def test_vllm_applies_exported_patches(tmp_path: Path) -> None:
    folder = write_config("Qwen3ForCausalLM", tmp_path)
    run_ranks(follow, 1, folder, timeout_s=280)
