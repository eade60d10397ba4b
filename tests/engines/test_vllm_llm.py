"""A whole vLLM engine on the CPU, with the backend by configuration alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import WeightSource
from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.environment import use_cpu
from tests.engines.offline import started, tokens
from tests.engines.plugin.cpu_parameter_server import let_vllm_receive
from tests.engines.programs import Program
from tests.worlds.ranks import free_port

# vLLM itself makes fp8 matrices of what it loads, transposed, and a scale for each row.
QUANTIZED: dict[str, Any] = {"quantization": "fp8_per_channel"}


def synced(source: WeightSource, llm: Any, folder: Path, **settings: Any) -> EngineSync:
    server = VllmServer(OfflineClient(llm))
    return EngineSync(source, server, shared_memory.Sender(folder / "socket"), **settings)


def parameters_of(llm: Any) -> dict[str, bytes]:
    """The bits of each of the engine's parameters. They come from another process."""
    [state] = llm.collective_rpc(bits_in)
    return dict(state)


def bits_in(worker: Any) -> list[tuple[str, bytes]]:
    named = worker.get_model().named_parameters()
    return [(n, p.detach().reshape(-1).view(torch.uint8).numpy().tobytes()) for n, p in named]


def follow_checkpoints(folder: Path) -> None:
    """Started on nothing; a ParameterServer brings whole checkpoints, before deltas and beside."""
    let_vllm_receive()
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    new = changed(old, 0.3, seed=1)
    extension = "checkpoint_engine.worker.VllmColocateWorkerExtension"
    llm = started(folder, old, load_format="dummy", worker_extension_cls=extension)
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    with synced(source, llm, folder) as sync:
        with pytest.raises(ConfigError, match="start vLLM on a checkpoint"):
            sync.connect()
        bring(llm, folder, old)
        assert sync.send_weights().full_synced == 0
        source.take(new)
        assert sync.send_weights().kind == "delta"
        bits = parameters_of(llm)
        bring(llm, folder, old)
        assert parameters_of(llm) != bits
        assert sync.send_weights().full_synced == 1
        assert parameters_of(llm) == bits
        bring(llm, folder, new)
        assert parameters_of(llm) == bits
        assert sync.send_weights().full_synced == 0


def bring(llm: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """By a ParameterServer, as checkpoint-engine's extension of vLLM's workers takes them."""
    from safetensors.torch import save_file

    device = f"GPU-{os.environ['TESTED_DEVICE']}"
    file = folder / "brought.safetensors"
    save_file(weights, file)
    with Program("-m", "tests.engines.parameter_server", file) as program:
        sockets = {device: f"ipc://@checkpoint-engine-{device}-0.sock"}
        llm.collective_rpc("update_weights_from_ipc", args=(sockets,))
        program.wait()


def reload(folder: Path) -> None:
    """Packed matrices are loaded and packed anew, for who wants that."""
    reloaded(folder)


def reload_quantized(folder: Path) -> None:
    """Quantised ones are quantised anew, by vLLM itself."""
    reloaded(folder, **QUANTIZED)


def reloaded(folder: Path, **settings: Any) -> None:
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    new = changed(old, 0.3, seed=1)
    reference = started(folder, new, **settings)
    expected, bits = tokens(reference), parameters_of(reference)
    del reference
    llm = started(folder, old, **settings)
    before = tokens(llm)
    assert before != expected
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    strange = Weights(source.weights | {"model.strange": torch.zeros(3)})
    with (
        synced(strange, llm, folder, without_routes="reload") as sync,
        pytest.raises(ConfigError, match=r"was started on has no 'model.strange'"),
    ):
        sync.connect()
    with (
        synced(source, llm, folder) as sync,
        pytest.raises(ConfigError, match=r"'model.layers.0.mlp|without_routes='reload'"),
    ):
        sync.connect()
    assert tokens(llm) == before
    with synced(source, llm, folder, without_routes="reload") as sync:
        llm.collective_rpc(lambda worker: break_once(worker.get_model()))
        with pytest.raises(EngineFailed, match="OSError: in the midst of it"):
            sync.connect()
        assert tokens(llm) == before
        sync.connect()
        assert sync.send_weights().full_synced == 0
        assert tokens(llm) == before
        source.take(new)
        assert sync.send_weights().kind == "delta"
        assert tokens(llm) == expected
        assert parameters_of(llm) == bits
        sync.connect()  # which reloads the copy: whoever has touched the weights, they are its
        assert sync.send_weights().full_synced == 0
        assert tokens(llm) == expected
        llm.collective_rpc("reset_weights")
        assert tokens(llm) != expected
        assert sync.send_weights().full_synced == 1  # nobody undoes what vLLM was asked for
        assert tokens(llm) == expected


def break_once(model: Any) -> None:
    """Let the loader fail when it has taken a part of a layer, and is not only watched."""
    load, failures = model.load_weights, iter([True])

    def load_weights(weights: Iterator[tuple[str, Tensor]]) -> None:
        some = list(islice(weights, 5))
        if some[0][1].is_meta or not next(failures, False):
            load(chain(some, weights))
            return
        load(iter(some))
        raise OSError("in the midst of it")

    model.load_weights = load_weights


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("what", "architecture", "packs"),
    [
        (follow_checkpoints, "LlamaForCausalLM", False),
        (reload, "LlamaForCausalLM", True),
        (reload, "Qwen3ForCausalLM", True),  # whose head is tied, and packed beside
        (reload, "Qwen3MoeForCausalLM", True),
        (reload_quantized, "LlamaForCausalLM", True),  # and the head is packed
    ],
)
def test_an_engine_by_configuration_alone(
    what: Callable[[Path], None],
    architecture: str,
    packs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if packs and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM packs no bf16 matrices on CPUs without AVX512: oneDNN refuses them")
    use_cpu(monkeypatch, packs=packs)
    if what is follow_checkpoints:  # its stand-ins for devices are in this process
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    monkeypatch.setenv("TESTED_DEVICE", str(free_port()))
    folder = write_config(architecture, tmp_path)
    with Program("-m", "tests.engines.test_vllm_llm", what.__name__, folder) as program:
        program.wait(timeout_s=480)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
