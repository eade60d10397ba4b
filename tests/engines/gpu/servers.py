"""Servers on GPUs of their own behind one trainer, over NCCL.

    python -m tests.engines.gpu.servers remote|fleet FOLDER

remote: the commands of docs/integrations/remote.md. fleet: two servers, of which one is killed and
started again while requests go on. The trainer has the first GPU, servers the next ones. Prints a
JSON object of what was found. Without a GPU it runs over gloo. Needs vLLM.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.processes import seeing_gpu
from deltasync import SyncStats
from deltasync.config import network_secret
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.http import Http
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.transports import collective
from tests.engines.checkpoints import Weights, change, checkpoint, write_config, write_model
from tests.engines.environment import ROOT
from tests.engines.programs import Program, wait_until_up
from tests.worlds.ranks import free_port

_IS_GPU = torch.cuda.is_available()
_BACKEND = "nccl" if _IS_GPU else "gloo"
_EXAMPLES = ROOT / "docs" / "examples"
_HOST = "127.0.0.1"
_ROUNDS, _SHARE = 20, 0.003
_FLAGS = [  # several servers may share a GPU here
    *("--weight-transfer-config", '{"backend": "deltasync"}'),
    *("--gpu-memory-utilization", "0.1"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
    *("--max-model-len", "512"),
    "--enforce-eager",  # or each start takes a minute
]


@contextmanager
def served(folder: Path, gpu: int) -> Iterator[tuple[str, Program]]:
    """A `vllm serve` that sees one GPU: its URL, and the process."""
    port = free_port()
    where = ["--model", folder, "--host", _HOST, "--port", port]
    with seeing_gpu(gpu):
        program = Program("-m", "vllm.entrypoints.openai.api_server", *where, *_FLAGS)
    with program:
        yield f"http://{_HOST}:{port}", program


def remote(folder: Path) -> dict[str, Any]:
    """A server follows the example's trainer, and answers as one that is started on its last."""
    last = folder / "last"
    with served(folder, 1) as (following, program):
        wait_until_up(Http(following), program)
        here = ["--host", _HOST, "--port", free_port(), "--backend", _BACKEND, "--out", last]
        with Program(_EXAMPLES / "vllm_remote.py", folder, following, *here) as trainer:
            text = trainer.wait()
        versions = re.findall(r"1 workers hold (v\d: .*)", text)
        assert len(versions) == 4, text
        assert "'weight_version': '5'" in text
        with served(last, 2) as (fresh, another):
            wait_until_up(Http(fresh), another)
            with Program(_EXAMPLES / "vllm_same.py", following, fresh) as compared:
                assert "the same" in compared.wait()
    return {"name": "remote", "backend": _BACKEND, "versions": versions}


class _Fleet:
    """Two servers and their trainer."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        device = torch.device("cuda" if _IS_GPU else "cpu")
        self._weights, self._generator = checkpoint(folder, 0), torch.Generator().manual_seed(1)
        self._source = Weights({n: t.to(device, copy=True) for n, t in self._weights.items()})
        link = collective.Sender(backend=_BACKEND, device=device, secret=network_secret())
        self.fleet = stack.enter_context(EngineFleet(self._source, link))
        self.running = {gpu: stack.enter_context(served(folder, gpu)) for gpu in (1, 2)}
        for gpu in self.running:
            self.add(gpu)

    def add(self, gpu: int) -> None:
        """Add the server of a GPU when it is up."""
        url, program = self.running[gpu]
        wait_until_up(Http(url), program)
        client = HttpClient(url)
        self.fleet.add(VllmServer(client), workers=client.workers(), paused=client.paused)

    def sync(self) -> tuple[float, SyncStats]:
        """What a sync of new weights took, and what it says."""
        change(self._weights, _SHARE, self._generator)
        self._source.take(self._weights)
        began = time.monotonic()
        stats = self.fleet.send_weights()
        return time.monotonic() - began, stats

    def answers(self) -> list[Any]:
        """Of each server: a version, and greedy tokens with the logarithms of probabilities."""
        asked = {"model": str(self._folder), "max_tokens": 32, "temperature": 0, "logprobs": 3}
        asked |= {"ignore_eos": True, "prompt": list(range(3, 20))}
        found = []
        for url, _ in self.running.values():
            [choice] = Http(url).post("v1/completions", asked)["choices"]
            version = Http(url).get("weight_info")["weight_version"]
            found.append((version, choice["text"], choice["logprobs"]))
        return found

    def same(self) -> bool:
        """Whether both serve the trainer's version, and answer alike."""
        first, second = self.answers()
        return bool(first == second and first[0] == str(self.fleet.sender.version))

    def restart(self, gpu: int) -> None:
        """Start another server, on the first weights, in place of one that has died."""
        url, _ = self.running[gpu]
        self.running[gpu] = self._stack.enter_context(served(self._folder, gpu))
        self.add(gpu)
        self.fleet.remove(url)


def fleet(folder: Path) -> dict[str, Any]:
    """Both servers follow; one is killed, misses versions, and its successor is caught up."""
    with ExitStack() as stack:
        two = _Fleet(folder, stack)
        syncs = [two.sync() for _ in range(_ROUNDS)]
        assert all(stats.receivers == 2 for _, stats in syncs), syncs
        assert two.same()
        two.running[2][1].__exit__(None, None, None)
        _, stats = two.sync()
        assert (stats.receivers, len(stats.lost)) == (1, 1), stats
        assert two.sync()[1].receivers == 1
        two.restart(2)
        assert two.sync()[1].receivers == 2
        assert two.same()
    took = sorted(seconds for seconds, _ in syncs[1:])
    ms = {"median_ms": 1e3 * median(took), "longest_ms": 1e3 * took[-1]}
    return {"name": "fleet", "backend": _BACKEND, "syncs": len(syncs), **ms}


def main(name: str, folder: Path) -> None:
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ["DELTASYNC_SECRET"] = secrets.token_hex(32)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(write_config("LlamaForCausalLM", folder))
    print(json.dumps({"remote": remote, "fleet": fleet}[name](folder)))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
