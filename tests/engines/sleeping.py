"""A vLLM that sleeps between syncs, as trainers on the same GPUs let it. Needs vLLM, no pytest.

python -m tests.engines.sleeping FOLDER

On GPUs its weights are released; vLLM's workers on CPUs do as if, and the test discards them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import cuda_ipc, shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.gpu import look
from tests.engines.offline import LONG, started, tokens

SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.2,
    "enable_sleep_mode": torch.cuda.is_available(),
}


class Sleeper:
    """An engine and its trainer, which take turns.

    Args:
        folder: Of a configuration.
        weights: That the engine is started on, and the trainer has.
    """

    def __init__(self, folder: Path, weights: dict[str, Tensor]) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.llm = started(folder, weights, **SETTINGS)
        device = "cuda" if self.is_gpu else "cpu"
        self.source = Weights({name: t.to(device, copy=True) for name, t in weights.items()})
        server = VllmServer(OfflineClient(self.llm))
        link = (cuda_ipc if self.is_gpu else shared_memory).Sender(folder / "socket")
        self.sync = EngineSync(self.source, server, link, timeout_s=120)

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)
        if level == 2 and not self.is_gpu:
            self.llm.collective_rpc(discard)

    def tokens(self) -> list[list[int]]:
        return tokens(self.llm, LONG)

    def is_refused(self) -> bool:
        try:
            self.sync.send_weights()
        except ConfigError as error:
            return "sleep" in str(error)
        return False


def main(folder: Path) -> None:
    write_config("LlamaForCausalLM", folder)
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    new = changed(old, 0.3, seed=1)
    reference = started(folder, new, **SETTINGS)
    expected = tokens(reference, LONG)
    del reference
    sleeper = Sleeper(folder, old)
    with sleeper.sync:
        sleeper.sync.send_weights()
        assert sleeper.tokens() != expected
        weights_that_are_kept_take_the_next_delta(sleeper, new, expected)
        weights_that_sleep_are_not_touched(sleeper, new, expected)


def weights_that_are_kept_take_the_next_delta(
    sleeper: Sleeper, new: dict[str, Tensor], expected: list[list[int]]
) -> None:
    for weights in (sleeper.source.weights, new):  # nothing has changed, and something
        sleeper.sleep(level=1)
        sleeper.source.take(weights)
        sleeper.llm.wake_up(tags=["weights"])
        stats = sleeper.sync.send_weights()
        assert (stats.kind, stats.full_synced, stats.joined) == ("delta", 0, 0), stats
        sleeper.llm.wake_up(tags=["kv_cache"])
    assert sleeper.tokens() == expected


def weights_that_sleep_are_not_touched(
    sleeper: Sleeper, new: dict[str, Tensor], expected: list[list[int]]
) -> None:
    for level in (1, 2):
        sleeper.sleep(level)
        sleeper.source.take(new)
        assert sleeper.is_refused()
        assert sleeper.is_refused()
        sleeper.llm.wake_up(tags=["kv_cache"])
        assert sleeper.is_refused()
        sleeper.llm.wake_up(tags=["weights"])
        stats = sleeper.sync.send_weights()
        assert stats.receivers == 1
        if level == 1:  # a sync that was refused has cost nothing
            assert (stats.kind, stats.joined, stats.full_synced) == ("delta", 0, 0), stats
        assert sleeper.tokens() == expected


def discard(worker: Any) -> None:
    """What becomes of what was loaded, and is not kept."""
    look.discard(worker.get_model(), worker.weight_transfer_engine._storages)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
