"""A plugin of vLLM: `AsyncLLM.pause_generation` takes the argument that verl 0.9.1 gives it."""

from __future__ import annotations

from functools import wraps
from typing import Any


def older_pause() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    pause = AsyncLLM.pause_generation
    if hasattr(pause, "takes_older"):
        return

    @wraps(pause)
    async def paused(
        self: Any, *args: Any, wait_for_inflight_requests: bool | None = None, **named: Any
    ) -> Any:
        if wait_for_inflight_requests is not None:
            named["mode"] = "wait" if wait_for_inflight_requests else "abort"
        return await pause(self, *args, **named)

    paused.takes_older = True  # type: ignore[attr-defined]
    AsyncLLM.pause_generation = paused
