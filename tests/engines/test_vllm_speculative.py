"""Engines with a draft model follow a trainer; what the drafter holds stays as it was."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.environment import use_cpu
from tests.engines.offline import save, started, stop, tokens
from tests.engines.programs import Program
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


def held_by(llm: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of what the engine's model, and its drafter's, compute with."""
    [(ours, drafts)] = llm.collective_rpc(digests)
    return ours, drafts


def digests(worker: Any) -> tuple[dict[str, str], ...]:
    """Without handles of libraries, which are new in each process."""
    runner = worker.model_runner
    return tuple(
        {
            path: digest(one.bits)
            for path, one in seen(model).items()
            if one.dtype != torch.int64 or one.bits.numel() > 8
            if "kv_cache" not in path
        }
        for model in (runner.model, runner.drafter.model)
    )


def follow(folder: Path, make: str, mode: str) -> None:
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    new = changed(old, 0.3, seed=1)
    drafts = folder / "drafts"
    drafts.mkdir()
    settings = {"speculative_config": globals()[make](drafts, old), "max_model_len": 128}
    cold = started(folder, new, **settings)
    expected, bits = tokens(cold), held_by(cold)
    stop(cold)
    llm = started(folder, old, **settings)
    before = tokens(llm)
    assert before != expected
    drafter = own_weights(llm)
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    server, link = VllmServer(OfflineClient(llm)), shared_memory.Sender(folder / "socket")
    with EngineSync(source, server, link, without_routes=mode) as sync:  # type: ignore[arg-type]
        sync.connect()
        assert sync.send_weights().full_synced == 0
        assert tokens(llm) == before
        source.take(new)
        assert sync.send_weights().kind == "delta"
        assert tokens(llm) == expected
    assert own_weights(llm) == drafter
    wrong = [
        {path for path in wanted if ours.get(path) != wanted[path]}
        for ours, wanted in zip(held_by(llm), bits, strict=True)
    ]
    assert wrong == [set(), set()], json.dumps([sorted(paths)[:5] for paths in wrong])
    stop(llm)


def own_weights(llm: Any) -> dict[str, str]:
    """Digests of the drafter's parameters that are not the model's."""
    [state] = llm.collective_rpc(drafter_alone)
    return dict(state)


def drafter_alone(worker: Any) -> dict[str, str]:
    runner = worker.model_runner
    shared = {id(one) for one in runner.model.parameters()}
    named = runner.drafter.model.named_parameters()
    own = {name: one for name, one in named if id(one) not in shared}
    assert own
    return {name: digest(one.detach().view(torch.uint8)) for name, one in own.items()}


def digest(bits: Tensor) -> str:
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("drafter", "mode", "packs"), [(eagle, "refuse", False), (of_its_own, "reload", True)]
)
def test_an_engine_with_a_draft_model_follows(
    drafter: Callable[..., object],
    mode: str,
    packs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if packs and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM packs no bf16 matrices on CPUs without AVX512: oneDNN refuses them")
    use_cpu(monkeypatch, packs=packs)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    folder = write_config("LlamaForCausalLM", tmp_path)
    arguments = (follow.__name__, folder, drafter.__name__, mode)
    with Program("-m", "tests.engines.test_vllm_speculative", *arguments) as program:
        program.wait(timeout_s=580)


if __name__ == "__main__":
    follow(Path(sys.argv[2]), *sys.argv[3:])
