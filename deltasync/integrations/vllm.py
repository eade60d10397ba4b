"""Both ends of vLLM's weight transfer interface; the trainer's end does not import vLLM.

An engine needs only `weight_transfer_config={"backend": "deltasync"}`: this package's entry point
registers the backend in each of vLLM's processes. The trainer uses an `EngineSync` of a
`VllmServer`, with a client for vLLM's calls. There is one client here for each way of running vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, get_args

from deltasync.errors import ConfigError, EngineFailed, TransportTimeout
from deltasync.integrations import vllm_core
from deltasync.integrations.http import Http
from deltasync.integrations.trainer_info import Caches, Work
from deltasync.integrations.vllm_core import BACKEND
from deltasync.sync.protocol.links import check_seconds

_PAUSE = "keep"
_SCHEDULING = ["scheduling"]  # resumes, unless a part of the engine sleeps


def register() -> None:
    """Register the backend with vLLM in this process. vLLM's plugin loader may call this twice.

    Engine cores that are created in this process then also take updates in one call.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "deltasync.integrations.vllm_engine", "DeltaSyncEngine")
    vllm_core.register()


class OfflineClient:
    """Client of an `LLM` in this process, which generates only on request: no pause is needed."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def collective_rpc(self, method: str, *args: object) -> Any:
        return self._llm.collective_rpc(method, args=args)


class AsyncClient:
    """Client of an `AsyncLLM`, for a thread other than that of its event loop.

    Args:
        engine: The AsyncLLM.
        loop: The loop that it runs in.
        timeout_s: For each call; a call that takes longer raises TransportTimeout.
    """

    def __init__(
        self, engine: Any, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 300.0
    ) -> None:
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        self._engine, self._loop, self._timeout_s = engine, loop, timeout_s

    def collective_rpc(self, method: str, *args: object) -> Any:
        return self._wait(self._engine.collective_rpc(method, args=args))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Freeze requests; let them continue afterwards unless a part of the engine sleeps.

        If the pause fails, the engine may have paused all the same, and is resumed too.
        """
        try:
            self._wait(self._engine.pause_generation(mode=_PAUSE, clear_cache=False))
            yield
        finally:
            self._wait(self._engine.wake_up(_SCHEDULING))

    def _wait(self, call: Coroutine[Any, Any, object]) -> object:
        answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        if not wait([answer], self._timeout_s).done:
            answer.cancel()
            raise TransportTimeout(f"vLLM did not answer in {self._timeout_s} s")
        return answer.result()


class HttpClient:
    """Client of a `vllm serve` that was started with `VLLM_SERVER_DEV_MODE=1`.

    Args:
        url: The server's scheme, host and port.
        api_key: The server's key, if it needs one.
        timeout_s: For each call.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        started = "that was started with VLLM_SERVER_DEV_MODE=1"
        self._http = Http(url, api_key=api_key, timeout_s=timeout_s, of="vLLM", started=started)
        self.url = self._http.url

    def collective_rpc(self, method: str, *args: object) -> Any:
        answer = self._http.post("collective_rpc", {"method": method, "args": args})
        return self._http.value_of(answer, "results", list)

    def workers(self) -> int:
        """Return the number of server processes that hold weights."""
        return self._http.value_of(self._http.get("get_world_size"), "world_size", int)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Like `AsyncClient.paused`."""
        try:
            self._http.post("pause", mode=_PAUSE, clear_cache=False)
            yield
        finally:
            self._http.post("wake_up", tags=_SCHEDULING[0])


class VllmServer:
    """vLLM as a `Server`. An update is one call, or several that do not pause; see `reach`.

    Args:
        client: One of the clients above, or another that has vLLM's `collective_rpc(method, *args)`
            or, as vLLM's own clients, its four calls: `init_weight_transfer_engine`,
            `start_weight_update`, `update_weights` and `finish_weight_update`. Without
            `collective_rpc` an update takes several calls, and clearing caches needs a method
            `clear_cache`. If the client reaches several engines, each of its calls has to reach
            them at the same time.
        caches: "clear" drops in each update what the old weights computed: cached prefixes, keys
            and values of requests that are kept (vLLM recomputes them), and encodings of images.
            "keep": prompts continue with keys and values of old weights for as long as vLLM keeps
            them.

    Raises:
        ConfigError: The client cannot do that.
    """

    def __init__(self, client: Any, *, caches: Caches = "clear") -> None:
        self._client = client
        self.url: str | None = getattr(client, "url", None)
        self._call: Callable[..., Any] | None = getattr(client, "collective_rpc", None)
        self._is_stale = False  # caches may hold results of older weights
        self._clear_cache: Callable[[], object] | None = None
        if caches not in get_args(Caches):
            known = ", ".join(get_args(Caches))
            raise ConfigError(f"caches is {caches!r}, which is none of {known}")
        if caches == "clear":
            self._clear_cache = getattr(client, "clear_cache", None)
            if self._call is not None:
                self._clear_cache = partial(self._call, vllm_core.CLEAR)
            elif self._clear_cache is None:
                raise ConfigError(
                    f"{type(client).__name__} has no clear_cache, so prompts would go on with keys "
                    'and values of old weights: give it one, or say caches="keep"'
                )

    def connect(self, trainer: dict[str, Any], /) -> None:
        self._is_stale = True  # an earlier trainer may have ended before it could clear them
        self._ask("init_weight_transfer_engine", {"trainer": trainer})

    def update(self, version: int, holder: str, /) -> None:
        self._is_stale = True
        self._update({"version": version, "holder": holder})
        self._clear()

    def name(self, version: int, holder: str, /) -> None:
        self._clear()  # does nothing if the update has done it
        what = {"version": version, "holder": holder, "work": "name"}
        self._update(what, str(version))

    def _update(self, what: dict[str, Any], *name: str) -> None:
        """Also finish an update that breaks off: workers that did not fail wait for that."""
        try:
            self._ask("start_weight_update")
            self._ask("update_weights", what)
            self._ask("finish_weight_update", *name)
        except BaseException as error:
            try:
                self._ask("finish_weight_update")
            except Exception as other:  # it had not begun, or the server is gone
                raise error from other
            raise

    def reach(self, paused: Callable[[], object], /) -> int:
        """Ask how many workers `switch` updates. Returns 0 if it must not be used.

        Args:
            paused: How the caller pauses generation. `switch` replaces the client's `paused`, and
                pausing not at all.
        """
        pauses_alike = paused in (nullcontext, getattr(self._client, "paused", nullcontext))
        call = self._call if pauses_alike else None
        return 0 if call is None else int(call(vllm_core.REACH)[0])

    def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> None:
        """Do `update` and `name` in one call, between two steps of the engine.

        Requests that run meanwhile continue afterwards, as with `paused`. See `vllm_core.update`.

        Raises:
            EngineFailed: A worker or the engine failed. If `stays_paused`, the engine is paused
                until a later `switch` succeeds.
        """
        assert self._call is not None  # or `reach` is 0
        self._is_stale = self._is_stale or work == "write"
        clears = self._clear_cache is not None and self._is_stale
        what = (version, work, clears, stays_paused, holder)
        if failure := self._call(vllm_core.UPDATE, *what)[0]:
            raise EngineFailed(failure)
        self._is_stale = False

    def disconnect(self, holder: str, /) -> None:
        self._ask("init_weight_transfer_engine", {"holder": holder})

    def _ask(self, method: str, *arguments: object) -> None:
        """One of vLLM's calls, to all workers."""
        if self._call is not None:
            self._call(method, *arguments)
        else:
            getattr(self._client, method)(*arguments)

    def _clear(self) -> None:
        if self._is_stale and self._clear_cache is not None:
            self._clear_cache()
        self._is_stale = False
