"""A whole vLLM, started on nothing: a ParameterServer brings checkpoints, before deltas and beside.

python -m tests.engines.brought FOLDER [FILE]

With a file of a checkpoint, the ParameterServer alone; its engine knows where to find its socket.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.offline import bits_in, started
from tests.engines.plugin.cpu_parameter_server import let_parameter_servers_send, let_vllm_receive
from tests.engines.programs import Program
from tests.worlds.ranks import free_port


def main(folder: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what stands in for devices is here
    os.environ["TESTED_DEVICE"] = str(free_port())
    let_vllm_receive()
    write_config("LlamaForCausalLM", folder)
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    new = changed(old, 0.3, seed=1)
    extension = "checkpoint_engine.worker.VllmColocateWorkerExtension"
    llm = started(folder, old, load_format="dummy", worker_extension_cls=extension)
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    server, link = VllmServer(OfflineClient(llm)), shared_memory.Sender(folder / "socket")
    with EngineSync(source, server, link) as sync:
        with pytest.raises(ConfigError, match="start vLLM on a checkpoint"):
            sync.connect()
        bring(llm, folder, old)
        assert sync.send_weights().full_synced == 0
        source.take(new)
        assert sync.send_weights().kind == "delta"
        bits = llm.collective_rpc(bits_in)
        bring(llm, folder, old)
        assert llm.collective_rpc(bits_in) != bits
        assert sync.send_weights().full_synced == 1
        assert llm.collective_rpc(bits_in) == bits


def bring(llm: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """By a ParameterServer, as checkpoint-engine's extension of vLLM's workers takes them."""
    device = f"GPU-{os.environ['TESTED_DEVICE']}"
    file = folder / "brought.safetensors"
    save_file(weights, file)
    with Program("-m", "tests.engines.brought", folder, file) as program:
        sockets = {device: f"ipc://@checkpoint-engine-{device}-0.sock"}
        llm.collective_rpc("update_weights_from_ipc", args=(sockets,))
        program.wait()


def serve(file: str) -> None:
    from checkpoint_engine.ps import ParameterServer

    let_parameter_servers_send()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    parameters = ParameterServer(master_addr="127.0.0.1", master_port=free_port())
    parameters.register_checkpoint("whole", files=[file])
    parameters.gather_metas("whole")
    parameters.update("whole", lambda _: None)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(sys.argv[2])
    else:
        main(Path(sys.argv[1]))
