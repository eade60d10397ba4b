"""A whole vLLM of two ranks, which prove and follow.

python -m tests.engines.parallel FOLDER ARCHITECTURE {tensor,experts,pipeline} [FORM]

With a form, the checkpoint is quantized.
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
from tests.engines import quantized
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.offline import bits_in, started, stop, tokens

SETUPS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
}


def main(folder: Path, architecture: str, setup: str, form: str | None = None) -> None:
    write_config(architecture, folder)
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    middle = changed(old, 0.3, seed=1)
    new = changed(middle, 0.01, seed=2)
    settings: dict[str, Any] = {"distributed_executor_backend": "mp"} | SETUPS[setup]
    settings |= {"worker_extension_cls": "tests.engines.faults.Faults"}
    if form is not None:
        old, middle, new = (quantized.served(form, one) for one in (old, middle, new))
        settings["hf_overrides"] = {"quantization_config": quantized.CONFIGS[form]}
    generates = setup == "tensor"  # vLLM 0.32 crashes on CPUs in the other setups
    reference = started(folder, new, **settings)
    expected = tokens(reference) if generates else []
    held = reference.collective_rpc(bits_in)
    stop(reference)
    llm = started(folder, old, **settings)
    assert not generates or tokens(llm) != expected
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    link = shared_memory.Sender(folder / "socket")
    server = VllmServer(OfflineClient(llm))
    options: dict[str, Any] = {"workers": 2, "timeout_s": 100}
    with EngineSync(source, server, link, **options) as sync:
        assert sync.send_weights().joined == 2
        for weights in (middle, new):
            source.take(weights)
            stats = sync.send_weights()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 2, {}), stats
    if form is None:
        for number, paused in enumerate((nullcontext, lambda: nullcontext())):  # not the client's
            link = shared_memory.Sender(folder / f"socket{number}")
            with EngineSync(source, server, link, paused=paused, **options) as sync:
                sync.send_weights()
                assert bool(server.reach(paused)) == (paused is nullcontext)  # one call, or several
                a_rank_that_fails_leaves_the_answers_of_others_as_they_are(llm, sync, source)
                source.take(new)
                assert sync.send_weights().receivers == 2
    assert not generates or tokens(llm) == expected
    now = llm.collective_rpc(bits_in)
    assert [rank.keys() for rank in now] == [rank.keys() for rank in held]
    assert now == held
    stop(llm)


def a_rank_that_fails_leaves_the_answers_of_others_as_they_are(
    llm: Any, sync: EngineSync, source: Weights
) -> None:
    """Nor does one of both keep the version. Later calls get the answers of each rank."""
    before = llm.collective_rpc(bits_in)
    source.take(changed(source.weights, 0.1, seed=3))
    for rank in range(2):
        llm.collective_rpc("fail", args=("write", 1, rank))
        with pytest.raises(DeltaSyncError) as caught:
            sync.send_weights()
        assert "planted" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        assert llm.collective_rpc(bits_in) == before
        assert llm.collective_rpc(rank_of) == [0, 1]
        sync.connect()  # a worker whose derived tensors were not finished is dirty, and mended
        sync.send_weights()
        llm.collective_rpc("fail", args=("begin", 1, rank))
        with pytest.raises(DeltaSyncError, match="planted"):
            asked(VllmServer(OfflineClient(llm)).name, 7, sync._engine.holder)
        source.take(changed(source.weights, 0.1, seed=4 + rank))
        before = llm.collective_rpc(bits_in)


def rank_of(worker: Any) -> int:
    return int(worker.rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
