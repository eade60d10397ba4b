"""A whole vLLM of two ranks, of which one fails.

python -m tests.engines.parallel FOLDER
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from deltasync.errors import DeltaSyncError
from deltasync.integrations.calls import asked
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.offline import bits_in, started, stop, tokens

SETTINGS: dict[str, Any] = {
    "distributed_executor_backend": "mp",
    "tensor_parallel_size": 2,
    "worker_extension_cls": "tests.engines.faults.Faults",
}


def main(folder: Path) -> None:
    write_config("LlamaForCausalLM", folder)
    new = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    llm = started(folder, new, **SETTINGS)
    expected, held = tokens(llm), llm.collective_rpc(bits_in)
    source, server = Weights(changed(new, 0.3, seed=1)), VllmServer(OfflineClient(llm))
    for number, paused in enumerate((nullcontext, lambda: nullcontext())):  # not the client's
        link = shared_memory.Sender(folder / f"socket{number}")
        options: dict[str, Any] = {"workers": 2, "timeout_s": 100, "paused": paused}
        with EngineSync(source, server, link, **options) as sync:
            sync.send_weights()
            assert bool(server.reach(paused)) == (paused is nullcontext)  # one call, or several
            a_rank_that_fails_leaves_the_answers_of_others_as_they_are(llm, sync, source)
            source.take(new)
            assert sync.send_weights().receivers == 2
        assert tokens(llm) == expected
        assert llm.collective_rpc(bits_in) == held
    stop(llm)


def a_rank_that_fails_leaves_the_answers_of_others_as_they_are(
    llm: Any, sync: EngineSync, source: Weights
) -> None:
    """Nor does one of both keep the version. Later calls get the answers of each rank."""
    before = llm.collective_rpc(bits_in)
    source.take(changed(source.weights, 0.1, seed=3))
    for rank in range(2):
        llm.collective_rpc("fail", args=("write", rank))
        with pytest.raises(DeltaSyncError) as caught:
            sync.send_weights()
        assert "planted" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        assert llm.collective_rpc(bits_in) == before
        assert llm.collective_rpc(rank_of) == [0, 1]
        sync.connect()  # a worker whose derived tensors were not finished is dirty, and mended
        sync.send_weights()
        llm.collective_rpc("fail", args=("begin", rank))
        with pytest.raises(DeltaSyncError, match="planted"):
            asked(VllmServer(OfflineClient(llm)).name, 7, sync._engine.holder)
        source.take(changed(source.weights, 0.1, seed=4 + rank))
        before = llm.collective_rpc(bits_in)


def rank_of(worker: Any) -> int:
    return int(worker.rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
