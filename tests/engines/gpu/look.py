"""What vLLM's workers tell of themselves in cases on GPUs."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from deltasync.delta.bits import storage_of
from deltasync.engines.proof.reach import Reach, is_handle
from tests.engines.reached import seen

# What requests and compilers left, in memory that nothing computes with before it is written: the
# compiler's examples, and outputs of captured graphs.
_SCRATCH = (".example_inputs[", ".concrete_cudagraph_entries[")


class Look:
    """Takes a case's calls: vLLM lets its worker inherit from this. Answers are JSON."""

    get_model: Any
    model_runner: Any
    weight_transfer_engine: Any

    def tensors_held(self) -> dict[str, list[object]]:
        """What can be reached from the model, by path: a digest of its bits, and its address.

        From the one that drafts for it, too.
        """
        drafter = getattr(self.model_runner, "drafter", None)
        return {
            path: [hashlib.blake2b(one.bits.cpu().numpy().tobytes()).hexdigest(), one.address]
            for path, one in seen([self.get_model(), getattr(drafter, "model", None)]).items()
            if not any(part in path for part in ("kv_cache", *_SCRATCH))
            if one.dtype != torch.int64 or one.bits.numel() > 8  # handles, new in each process
        }

    def discard_weights(self) -> None:
        """What becomes of what was loaded while the engine sleeps: vLLM keeps buffers alone.

        The memory that the model was loaded into, but for handles of kernels, is overwritten.
        """
        model, loaded = self.get_model(), self.weight_transfer_engine._storages
        kept = {storage_of(buffer) for buffer in model.buffers()}
        for found in Reach([("", model)]).tensors.values():
            here = found.alias
            is_ours = here.untyped_storage().data_ptr() in loaded and storage_of(here) not in kept
            if is_ours and not (is_handle(here) or here.is_meta):
                memory = torch.empty(0, dtype=torch.uint8, device=here.device)
                memory.set_(here.untyped_storage()).fill_(7)
