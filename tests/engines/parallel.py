"""A whole vLLM of several ranks, which prove and follow.

python -m tests.engines.parallel FOLDER ARCHITECTURE {one,tensor,experts,pipeline} [FORM]

With a form, the checkpoint is quantized.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.integrations.calls import asked
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines import quantized
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.offline import started, stop, tokens

SETUPS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
}

_LEFT_OUT = "model.norm.weight"


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
    workers = 1 if setup == "one" else 2
    generates = setup in ("one", "tensor")  # vLLM 0.32 crashes on CPUs in the other setups
    reference = started(folder, new, **settings)
    expected = tokens(reference) if generates else []
    held = reference.collective_rpc(bits_in)
    stop(reference)
    llm = started(folder, old, **settings)
    assert not generates or tokens(llm) != expected
    a_trainer_that_is_refused_leaves_the_answers_as_they_are(llm, folder, old, workers)
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
    link = shared_memory.Sender(folder / "socket")
    server = VllmServer(OfflineClient(llm))
    options: dict[str, Any] = {"workers": workers, "timeout_s": 100}
    with EngineSync(source, server, link, **options) as sync:
        assert sync.send_weights().joined == workers
        for weights in (middle, new):
            source.take(weights)
            stats = sync.send_weights()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", workers, {}), stats
    if form is None and workers == 2:
        for number, paused in enumerate((nullcontext, lambda: nullcontext())):  # not the client's
            link = shared_memory.Sender(folder / f"socket{number}")
            with EngineSync(source, server, link, paused=paused, **options) as sync:
                sync.send_weights()
                assert bool(server.reach(paused)) == (paused is nullcontext)  # one call, or several
                a_rank_that_fails_leaves_the_answers_of_others_as_they_are(llm, sync, source)
                source.take(new)
                assert sync.send_weights().receivers == workers
    assert not generates or tokens(llm) == expected
    now = llm.collective_rpc(bits_in)
    assert [rank.keys() for rank in now] == [rank.keys() for rank in held]
    assert now == held
    stop(llm)
    sys.stdout.write("followed\n")


def a_trainer_that_is_refused_leaves_the_answers_as_they_are(
    llm: Any, folder: Path, weights: dict[str, Tensor], workers: int
) -> None:
    """Later calls get the answers of each rank."""
    source = Weights({n: tensor.clone() for n, tensor in weights.items() if n != _LEFT_OUT})
    server, link = VllmServer(OfflineClient(llm)), shared_memory.Sender(folder / "refused")
    with (
        EngineSync(source, server, link, workers=workers, timeout_s=100) as sync,
        pytest.raises(ConfigError, match=_LEFT_OUT),
    ):
        sync.connect()
    with pytest.raises(Exception, match="draft"):
        llm.start_draft_weight_update()
    for _ in range(2):
        assert llm.collective_rpc(rank_of) == list(range(workers))


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


def bits_in(worker: Any) -> dict[str, bytes]:
    """Of a rank's parameters."""
    named = worker.get_model().named_parameters()
    return {n: p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for n, p in named}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
