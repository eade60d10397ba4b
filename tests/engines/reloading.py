"""A whole vLLM that has packed or quantized its matrices, to which no route leads.

python -m tests.engines.reloading FOLDER ARCHITECTURE [QUANTIZATION]

With a quantization, vLLM itself makes such matrices of what it loads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deltasync import WeightSource
from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.offline import bits_in, started, tokens


def synced(source: WeightSource, llm: Any, folder: Path, **settings: Any) -> EngineSync:
    server = VllmServer(OfflineClient(llm))
    return EngineSync(source, server, shared_memory.Sender(folder / "socket"), **settings)


def main(folder: Path, architecture: str, quantization: str | None = None) -> None:
    write_config(architecture, folder)
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    new = changed(old, 0.3, seed=1)
    reference = started(folder, new, quantization=quantization)
    expected, bits = tokens(reference), reference.collective_rpc(bits_in)
    del reference
    llm = started(folder, old, quantization=quantization)
    before = tokens(llm)
    assert before != expected
    source = Weights({name: tensor.clone() for name, tensor in old.items()})
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
        assert sync.send_weights().full_synced == 0
        assert tokens(llm) == before
        source.take(new)
        assert sync.send_weights().kind == "delta"
        assert tokens(llm) == expected
        assert llm.collective_rpc(bits_in) == bits
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
