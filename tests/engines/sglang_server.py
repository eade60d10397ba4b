"""Whole servers of SGLang's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync.integrations.http import Http
from tests.engines.checkpoints import save
from tests.engines.programs import Program, wait_until_up
from tests.worlds.ranks import free_port

_LIMITS = {
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--context-length": 512,
    "--max-total-tokens": 2048,
    "--max-running-requests": 4,
}
ON_CPU = {"--device": "cpu", "--attention-backend": "torch_native"} | _LIMITS
ON_GPU = {"--attention-backend": "triton", "--mem-fraction-static": 0.8} | _LIMITS


@contextmanager
def served(
    folder: Path, weights: dict[str, Tensor], *settings: object, port: int | None = None
) -> Iterator[str]:
    """The address of a server that was started on these weights."""
    save(folder, weights)
    port = port or free_port()
    chosen = ON_GPU if torch.cuda.is_available() else ON_CPU
    flags = [word for pair in chosen.items() for word in pair]
    flags += [
        "--skip-tokenizer-init",
        "--disable-cuda-graph",
        "--skip-server-warmup",
        *settings,
    ]
    server = ["-m", "sglang.launch_server", "--model-path", folder, "--port", port, *flags]
    with Program(*server) as program:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(Http(url), program)
        yield url


def generate(server: Http, count: int = 12, *, prompt: int = 17) -> Any:
    """Of a prompt of so many tokens: each longer one begins with all shorter ones."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    tokens = list(range(3, 3 + prompt))
    return server.post("generate", {"input_ids": tokens, "sampling_params": sampling})
