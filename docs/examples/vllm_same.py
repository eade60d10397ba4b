"""Asks two vLLM servers the same, and fails if their answers differ by a bit.

python docs/examples/vllm_same.py http://SERVER:8000 http://SERVER:8001

One follows a trainer; the other was started on the checkpoint that this trainer wrote last.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from deltasync.integrations.http import Http


def answers(url: str) -> list[Any]:
    """Tokens that the model finds most likely, and the logarithms of their probabilities."""
    server = Http(url, api_key=os.environ.get("VLLM_API_KEY"))
    model = server.get("v1/models")["data"][0]["id"]
    asked = {"model": model, "max_tokens": 32, "temperature": 0, "logprobs": 3}
    prompts = [list(range(start, start + 20)) for start in range(10, 90, 20)]
    choices = server.post("v1/completions", asked | {"prompt": prompts})["choices"]
    return [(choice["text"], choice["logprobs"]) for choice in choices]


def main(following: str, fresh: str) -> None:
    same = answers(following) == answers(fresh)
    print("the same" if same else "different")
    sys.exit(not same)


if __name__ == "__main__":
    main(*sys.argv[1:])
