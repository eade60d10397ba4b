"""One case of SGLang: a server follows a trainer, and is compared with one started on the same.

`tests.engines.gpu.follow` runs it. Runs on a CPU without a GPU. Needs SGLang.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import torch

from deltasync.errors import DeltaSyncError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.transports import cuda_ipc, shared_memory
from tests.engines.checkpoints import Weights
from tests.engines.gpu.cases import Case
from tests.engines.gpu.follow import versions_of
from tests.engines.sglang_server import generate, served

_PROMPTS = (17, 30)


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What is found."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end too
    old, *others = versions_of(case, folder)
    with served(folder, others[-1]) as url:
        expected, cold = answers(Http(url)), checksums(Http(url))
    with served(folder, old) as url:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mine = Weights({name: tensor.to(device, copy=True) for name, tensor in old.items()})
        server = SglangServer(url)
        link = (cuda_ipc if device == "cuda" else shared_memory).Sender(folder / "socket")
        with EngineSync(mine, server, link, paused=server.paused, timeout_s=120) as sync:
            try:
                sync.send_weights()
                for weights in others:
                    answers(Http(url))  # what is cached of its prompts is of the version before
                    mine.take(weights)
                    sync.send_weights()
            except DeltaSyncError as error:
                said = f"{type(error).__name__} in a sync: {error}"
                return {"outcome": "failed", "printed": said}
        is_same, is_equal = answers(Http(url)) == expected, checksums(Http(url)) == cold
    outcome = "routed" if is_same and is_equal else "WRONG"
    wrong = [] if is_equal else ["checksums"]
    return {"outcome": outcome, "wrong": wrong, "tokens": is_same}


def answers(http: Http) -> list[list[int]]:
    """Greedy tokens, one prompt at a time."""
    return [generate(http, prompt=length)["output_ids"] for length in _PROMPTS]


def checksums(http: Http) -> dict[str, str]:
    """Of what the server's workers hold, by rank and name."""
    ranks = http.post("weights_checker", {"action": "checksum"})["ranks"]
    return {f"{n}.{k}": v for n, rank in enumerate(ranks) for k, v in rank["checksums"].items()}
