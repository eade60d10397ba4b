"""A whole vLLM with a draft model follows a trainer; what the drafter holds stays as it was.

python -m tests.engines.speculative FOLDER {eagle,of_its_own} {refuse,reload}
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, save, write_config
from tests.engines.offline import started, stop, tokens
from tests.engines.reached import seen


def of_its_own(folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """A smaller model of the same kind."""
    del weights
    draft = write_config("LlamaForCausalLM", folder, {"num_hidden_layers": 1})
    save(draft, {name: tensor * 0.05 for name, tensor in checkpoint(draft, 7).items()})
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}


def eagle(folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """One layer over the model's hidden states; embeddings and head are the model's own."""
    write_config("LlamaForCausalLM", folder, {"num_hidden_layers": 1})
    layer = {
        name.removeprefix("model."): tensor.flip(0).contiguous()
        for name, tensor in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    hidden = weights["model.norm.weight"].numel()
    joined = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(5)) * 0.05
    save(folder, layer | {"fc.weight": joined.bfloat16()})
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 2}


def held_by(worker: Any) -> list[dict[str, str]]:
    """Digests of what the model, and its drafter's, compute with.

    Without handles of libraries, which are new in each process.
    """
    runner = worker.model_runner
    return [
        {
            path: hashlib.sha256(one.bits.numpy().tobytes()).hexdigest()
            for path, one in seen(model).items()
            if one.dtype != torch.int64 or one.bits.numel() > 8
            if "kv_cache" not in path
        }
        for model in (runner.model, runner.drafter.model)
    ]


def main(folder: Path, make: str, mode: str) -> None:
    write_config("LlamaForCausalLM", folder)
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    new = changed(old, 0.3, seed=1)
    drafts = folder / "drafts"
    drafts.mkdir()
    settings = {"speculative_config": globals()[make](drafts, old), "max_model_len": 128}
    cold = started(folder, new, **settings)
    expected, [held] = tokens(cold), cold.collective_rpc(held_by)
    stop(cold)
    llm = started(folder, old, **settings)
    before = tokens(llm)
    assert before != expected
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    server, link = VllmServer(OfflineClient(llm)), shared_memory.Sender(folder / "socket")
    with EngineSync(source, server, link, without_routes=mode) as sync:  # type: ignore[arg-type]
        sync.connect()
        assert sync.send_weights().full_synced == 0
        assert tokens(llm) == before
        source.take(new)
        assert sync.send_weights().kind == "delta"
        assert tokens(llm) == expected
    [now] = llm.collective_rpc(held_by)
    for ours, wanted in zip(now, held, strict=True):
        assert wanted.items() <= ours.items()
    stop(llm)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
