"""SGLang's quantized layers are written in place, where it keeps or moves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync.integrations.engine_sync import EngineSync
from deltasync.transports import shared_memory
from tests.engines import quantized
from tests.engines import sglang_models as sglang
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.environment import use_sglang
from tests.engines.reached import seen
from tests.engines.test_sglang_derived import cold, differences
from tests.worlds.ranks import run_ranks

Found = Callable[[str, str, str, str], None]


def use_layouts_of_gpus() -> None:
    """Let SGLang load what it runs on GPUs alone, as GPUs keep it."""
    import sglang.srt.layers.quantization.fp8

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    sglang.srt.layers.quantization.fp8._is_cpu = False


def versions(folder: Path, form: str) -> list[dict[str, Tensor]]:
    """What the engine is started on, those of a full sync, and those of a delta."""
    weights = [{n: t * 0.05 for n, t in checkpoint(folder, seed).items()} for seed in (0, 1)]
    return [quantized.served(form, one) for one in (*weights, changed(weights[1], 0.01, 2))]


def keep_started(rank: int, folder: Path, file: Path) -> None:
    use_layouts_of_gpus()
    sglang.keep_started(rank, folder, file)


def follow(_: int, form: str, place: Path) -> None:
    use_layouts_of_gpus()
    folder = place / "model"
    first, *others = versions(place, form)
    sglang.write_weights(folder, first)
    model = sglang.started(folder)
    before = seen(model)
    source = Weights({name: tensor.clone() for name, tensor in others[0].items()})
    transport = shared_memory.Sender(folder / "socket")
    with EngineSync(source, sglang.Server(model), transport) as sync:
        for number, weights in enumerate(others, 1):
            source.take(weights)
            assert sync.send_weights().kind == ("full" if number == 1 else "delta")
            now = seen(model)
            assert differences(now, cold(place, number)) == []
            moved = [path for path, one in now.items() if one.address != before[path].address]
            assert moved == []  # a captured graph would read what was there


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("Qwen3ForCausalLM", "block FP8"),  # SGLang 0.5.23 loads no such scales into a Llama
        ("LlamaForCausalLM", "channel FP8"),
        ("LlamaForCausalLM", "channel INT8"),
    ],
)
def test_a_quantized_engine_follows(
    architecture: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Found
) -> None:
    use_sglang(monkeypatch)
    write_config(architecture, tmp_path)
    every = versions(tmp_path, form)
    folder = tmp_path / "model"
    folder.mkdir()
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = quantized.CONFIGS[form]
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    for number, weights in enumerate(every):
        sglang.write_weights(folder, weights)
        if number:
            run_ranks(keep_started, 1, folder, cold(tmp_path, number), timeout_s=110)
    run_ranks(follow, 1, form, tmp_path, timeout_s=110)
    found("SGLang", f"{architecture}, {form}", "1", "routed")
