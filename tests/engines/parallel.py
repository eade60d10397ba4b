"""A whole vLLM of several ranks, which prove and follow. Needs vLLM, no pytest.

python -m tests.engines.parallel FOLDER ARCHITECTURE {tensor,experts,pipeline} {refuse,reload}
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch

from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import WithoutRoutes
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.offline import started, tokens
from tests.engines.sleeping import make_known

SETUPS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
}


def main(folder: Path, architecture: str, setup: str, mode: WithoutRoutes) -> None:
    make_known(folder)
    write_config(architecture, folder)
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    middle = changed(old, 0.3, seed=1)
    new = changed(middle, 0.01, seed=2)
    settings = {"distributed_executor_backend": "mp"} | SETUPS[setup]
    generates = setup == "tensor"  # vLLM 0.32 crashes on CPUs where it does in the other setups
    reference = started(folder, new, **settings)
    expected = tokens(reference) if generates else []
    held = reference.collective_rpc(bits_in)
    stop(reference)
    llm = started(folder, old, **settings)
    assert not generates or tokens(llm) != expected
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    link = shared_memory.Sender(folder / "socket")
    server = VllmServer(OfflineClient(llm))
    with EngineSync(source, server, link, workers=2, without_routes=mode, timeout_s=100) as sync:
        assert sync.send_weights().joined == 2
        for weights in (middle, new):
            source.take(weights)
            stats = sync.send_weights()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 2, {}), stats
        assert not generates or tokens(llm) == expected
        now = llm.collective_rpc(bits_in)
        assert [rank.keys() for rank in now] == [rank.keys() for rank in held]
        assert now == held
    stop(llm)
    sys.stdout.write("followed\n")


def stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def bits_in(worker: Any) -> dict[str, bytes]:
    """Of a rank's parameters."""
    named = worker.get_model().named_parameters()
    return {n: p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for n, p in named}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], cast("WithoutRoutes", sys.argv[4]))
