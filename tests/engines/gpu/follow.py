"""One case: an engine follows a trainer, and is compared with one that is started on the same.

    python -m tests.engines.gpu.follow NAME FOLDER

Prints a JSON object: what was found, and of which engine, kernels and GPU. Without a GPU it runs on
the CPU, which shows that the program does what it should. Needs vLLM, no pytest.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import WithoutRoutes
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.quant.served import ServedSource, served_weights
from deltasync.sync.source.tensors import WeightSource
from deltasync.transports import collective, cuda_ipc, shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.gpu.cases import CASES, Case
from tests.engines.offline import SHORT, started, tokens
from tests.engines.parallel import stop
from tests.engines.quantized import CONFIGS
from tests.engines.sleeping import make_known

Held = list[dict[str, tuple[str, int]]]
"""Of each worker, by path: a digest of a tensor's bits, and its address."""

_IS_GPU = torch.cuda.is_available()
# Engines that start side by side cannot measure what memory is left.
_LEAST: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
}
_KERNELS = ("impl", "quant_method", "fp8_linear", "kernel", "experts_cls")
_BACKENDS = ("fp8_backend", "unquantized_backend", "mxfp4_backend", "nvfp4_backend")


class Trial:
    """A case in a folder, with three versions of its weights."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        quantized = {"quantization_config": CONFIGS[case.form]} if case.form else {}
        write_config(case.architecture, folder, case.config | quantized)
        old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
        middle = changed(old, 0.3, seed=1)
        self.versions = [old, middle, changed(middle, 0.01, seed=2)]

    def start(self, version: int) -> Any:
        """An engine that was started on a version, as a checkpoint of its form has it."""
        weights: dict[str, Tensor] = self.versions[version]
        if self.case.form:
            weights = dict(served_weights(weights.items(), self.case.forms))
        return started(self.folder, weights, **_LEAST | self.case.settings)

    def run(self) -> dict[str, Any]:
        """What is found."""
        cold = self.start(2)
        expected, before = one_by_one(cold), held(cold)
        again = held(cold)
        idle = [
            {p for p in rank if rank[p] == then.get(p)}
            for rank, then in zip(before, again, strict=True)
        ]
        stop(cold)
        live = self.start(0)
        found: dict[str, Any] = {"kernels": sorted(set().union(*live.collective_rpc(kernels_of)))}
        for mode in ("refuse", "reload"):
            try:
                return found | self.follow(live, mode, expected, before, idle)
            except ConfigError as error:
                found |= {"refused": str(error)}
        return found | {"outcome": "refused"}

    def follow(
        self,
        live: Any,
        mode: WithoutRoutes,
        expected: list[list[int]],
        cold: Held,
        idle: list[set[str]],
    ) -> dict[str, Any]:
        """Sync to the last version. Raises ConfigError at connect."""
        device = "cuda" if _IS_GPU else "cpu"
        mine = Weights({n: t.to(device, copy=True) for n, t in self.versions[0].items()})
        source: WeightSource = mine
        if self.case.form:
            source = ServedSource(mine, self.case.forms)
        places = held(live)
        server = VllmServer(OfflineClient(live))
        with EngineSync(
            source,
            server,
            self.link(mode),
            workers=self.case.workers,
            without_routes=mode,
            timeout_s=120,
        ) as sync:
            sync.connect()
            sync.send_weights()
            seconds, stats = [], []
            for weights in self.versions[1:]:
                mine.take(weights)
                one_by_one(live)  # what is cached of its prompts is of the version before
                began = time.perf_counter()
                stats.append(sync.send_weights())
                seconds.append(time.perf_counter() - began)
            now = held(live)
            wrong = differing(now, cold, idle)
            moved = [
                p
                for a, b in zip(places, now, strict=True)
                for p in a
                if p in b and a[p][1] != b[p][1]
            ]
            is_same = one_by_one(live) == expected
        outcome = "WRONG" if wrong or not is_same else "routed" if mode == "refuse" else "reloaded"
        return {
            "outcome": outcome,
            "wrong": wrong[:20],
            "moved": sorted(p for p in moved if "kv_cache" not in p)[:20],
            "tokens": is_same,
            "tensors": sum(map(len, idle)),
            "seconds": seconds,
            "bytes": [one.payload_bytes for one in stats],
        }

    def link(self, mode: str) -> Any:
        """One GPU is shared by both ends; with more, each worker is on one of its own."""
        if self.case.workers > 1 and _IS_GPU:
            return collective.Sender(device=torch.device("cuda", 0))
        return (cuda_ipc if _IS_GPU else shared_memory).Sender(self.folder / f"{mode}.socket")


def one_by_one(llm: Any) -> list[list[int]]:
    """Greedy tokens: near-ties depend on which prompts are asked for together."""
    return [tokens(llm, [prompt])[0] for prompt in SHORT]


def held(llm: Any) -> Held:
    """What workers can reach from their models."""
    return list(llm.collective_rpc(look))


def look(worker: Any) -> dict[str, tuple[str, int]]:
    """Runs in a worker."""
    from tests.engines.reached import seen

    return {
        path: (hashlib.blake2b(one.bits.cpu().numpy().tobytes()).hexdigest(), one.address)
        for path, one in seen(worker.get_model()).items()
        if "kv_cache" not in path
    }


def kernels_of(worker: Any) -> set[str]:
    """Names of what computes, in a worker."""
    names: set[str] = set()
    for module in worker.get_model().modules():
        for holder in (module, getattr(module, "quant_method", None)):
            for attribute in _KERNELS:
                if (value := getattr(holder, attribute, None)) is not None:
                    names.add(value.__name__ if isinstance(value, type) else type(value).__name__)
            backends = (getattr(holder, attribute, None) for attribute in _BACKENDS)
            names |= {str(value) for value in backends if value is not None}
    return names


def differing(now: Held, cold: Held, compared: list[set[str]]) -> list[str]:
    """Paths of tensors that are not as after a cold start, or are not there."""
    return [
        f"{rank}{path}"
        for rank, paths in enumerate(compared)
        for path in sorted(paths)
        if now[rank].get(path, ("",))[0] != cold[rank][path][0]
    ]


def main(name: str, folder: Path) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the look inside
    folder.mkdir(parents=True, exist_ok=True)
    make_known(folder)
    import vllm

    found = Trial(CASES[name], folder).run()
    gpus = Counter(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    facts = {"name": name, "vllm": vllm.__version__, "torch": torch.__version__, "gpus": dict(gpus)}
    print(json.dumps(facts | found))  # noqa: T201 a script


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
