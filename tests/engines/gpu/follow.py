"""One case: an engine follows a trainer, and is compared with one that is started on the same.

    python -m tests.engines.gpu.follow NAME FOLDER

Prints a JSON object: what was found, and of which engine, kernels and GPU. Without a GPU it runs on
the CPU, which shows that the program does what it should. Needs the engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import WithoutRoutes
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.quant.served import ServedSource
from deltasync.sync.source.tensors import WeightSource
from deltasync.transports import cuda_ipc, shared_memory
from tests.engines.checkpoints import Weights, changed, checkpoint, save, write_config
from tests.engines.gpu.cases import CASES, Case
from tests.engines.gpu.drafts import DRAFTS
from tests.engines.offline import SHORT, engine_settings, stop, tokens
from tests.engines.quantized import CONFIGS, constants, forms_of, served

Held = list[dict[str, tuple[str, int]]]
"""Of each worker, by path: a digest of a tensor's bits, and its address."""

_IS_GPU = torch.cuda.is_available()
# Engines that start side by side cannot measure what memory is left.
_SETTINGS: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "worker_extension_cls": "tests.engines.gpu.look.Look",
}
_WHY = {"refuse": "refused", "reload": "not_reloaded"}


class Trial:
    """A case in a folder, with three versions of its weights."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.versions = versions_of(case, folder)
        self.settings = _SETTINGS | case.settings
        if case.draft:
            (folder / "draft").mkdir()
            drafted = DRAFTS[case.draft](folder / "draft", self.versions[0])
            self.settings["speculative_config"] = drafted | {"num_speculative_tokens": 2}
        if not _IS_GPU:  # vLLM's workers on CPUs do as if
            self.settings.pop("enable_sleep_mode", None)

    @contextmanager
    def started(self, version: int) -> Iterator[Any]:
        """An `LLM` that is started on a version, as a checkpoint of its form has it."""
        from vllm import LLM

        weights = self.versions[version]
        if form := self.case.form:
            weights = served(form, weights) | constants(form, self.versions[0])
        save(self.folder, weights)
        llm = LLM(model=str(self.folder), **engine_settings(self.settings))
        try:
            yield llm
        finally:
            stop(llm)

    def run(self) -> dict[str, Any]:
        """What is found."""
        with self.started(2) as cold:
            expected = self.answers(cold)
            before, again = held(cold), held(cold)
        idle = [
            {p for p in rank if rank[p] == then.get(p)}
            for rank, then in zip(before, again, strict=True)
        ]
        with self.started(0) as live:
            found: dict[str, Any] = {}
            for mode in ("refuse", "reload"):
                try:
                    return found | self.follow(live, mode, expected, before, idle)
                except ConfigError as error:
                    found[_WHY[mode]] = str(error)
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
            scales = constants(self.case.form, self.versions[0])
            scales = {name: tensor.to(device) for name, tensor in scales.items()}
            source = ServedSource(mine, forms_of(self.case.form), constants=scales)
        places = held(live)
        options: dict[str, Any] = {"workers": self.case.workers, "without_routes": mode}
        link, server = self.link(mode), VllmServer(OfflineClient(live))
        with EngineSync(source, server, link, timeout_s=120, **options) as sync:
            sync.connect()
            try:
                self.sync_all(live, mine, sync)
            except DeltaSyncError as error:
                said = f"{mode}: {type(error).__name__} in a sync: {error}"
                return {"outcome": "failed", "printed": said}
            is_same = self.answers(live) == expected
            now = held(live)
        wrong = differing(now, cold, idle)
        moved = [
            p for a, b in zip(places, now, strict=True) for p in a if p in b and a[p][1] != b[p][1]
        ]
        is_wrong = wrong or not is_same
        outcome = "WRONG" if is_wrong else "routed" if mode == "refuse" else "reloaded"
        return {
            "outcome": outcome,
            "wrong": wrong[:20],
            "moved": sorted(moved)[:20],
            "tokens": is_same,
        }

    def sync_all(self, live: Any, mine: Weights, sync: EngineSync) -> None:
        """One version after the other, the last one last."""
        sync.send_weights()
        for number in (1, 2):
            self.answers(live)  # what is cached of its prompts is of the version before
            if not self.case.sleeps:
                mine.take(self.versions[number])
                sync.send_weights()
                continue
            live.sleep(number)
            if number == 2 and not _IS_GPU:
                live.collective_rpc("discard_weights")
            mine.take(self.versions[number])
            assert is_refused(sync)
            if number == 2:
                live.wake_up(tags=["kv_cache"])
                assert is_refused(sync)
            live.wake_up(tags=["weights"])
            stats = sync.send_weights()
            if number == 1:  # the sync that was refused has cost nothing
                assert (stats.kind, stats.joined, stats.full_synced) == ("delta", 0, 0), stats
                live.wake_up(tags=["kv_cache"])

    def answers(self, live: Any) -> list[list[int]]:
        """Greedy tokens, one prompt at a time."""
        if not _IS_GPU and {"EP", "PP"} & set(self.case.setup.split()):
            return []  # vLLM 0.32 crashes there
        return [tokens(live, [prompt])[0] for prompt in SHORT]

    def link(self, mode: str) -> Any:
        """Both ends share the first GPU; workers on others copy payloads from there."""
        return (cuda_ipc if _IS_GPU else shared_memory).Sender(self.folder / f"{mode}.socket")


def versions_of(case: Case, folder: Path) -> list[dict[str, Tensor]]:
    """A trainer's weights, three times, after the checkpoint's configuration was written."""
    quantized = {"quantization_config": CONFIGS[case.form]} if case.form else {}
    write_config(case.architecture, folder, case.config | quantized)
    old = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
    middle = changed(old, 0.3, seed=1)
    return [old, middle, changed(middle, 0.01, seed=2)]


def is_refused(sync: EngineSync) -> bool:
    """Whether a sync is, since the engine sleeps."""
    try:
        sync.send_weights()
    except ConfigError as error:
        return "sleep" in str(error)
    return False


def held(live: Any) -> Held:
    """What workers can reach from their models."""
    return list(live.collective_rpc("tensors_held"))


def differing(now: Held, cold: Held, compared: list[set[str]]) -> list[str]:
    """Paths of tensors that are not as after a cold start, or are not there."""
    return [
        f"{rank}{path}"
        for rank, paths in enumerate(compared)
        for path in sorted(paths)
        if now[rank].get(path, ("",))[0] != cold[rank][path][0]
    ]


def main(name: str, folder: Path) -> None:
    case = CASES[name]
    os.environ.update(case.environment)
    folder.mkdir(parents=True, exist_ok=True)
    if case.engine == "sglang":
        from tests.engines.gpu import follow_sglang

        found = {"sglang": version("sglang")} | follow_sglang.run(case, folder)
    else:
        import vllm

        found = {"vllm": vllm.__version__} | Trial(case, folder).run()
    gpus = Counter(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    facts = {"name": name, "torch": torch.__version__, "gpus": dict(gpus)}
    print(json.dumps(facts | found))  # noqa: T201 a script


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
