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
from typing import Any, Literal, Protocol, get_args

from deltasync.errors import ConfigError, EngineFailed, TransportTimeout
from deltasync.integrations import vllm_core
from deltasync.integrations.http import Http
from deltasync.integrations.trainer_info import Caches, Work
from deltasync.integrations.vllm_core import BACKEND, NOT_CLEARED
from deltasync.sync.protocol.links import check_seconds

PauseMode = Literal["abort", "wait", "keep"]
_SCHEDULING = ["scheduling"]  # resumes, unless a part of the engine sleeps


def register() -> None:
    """Register the backend with vLLM in this process. vLLM's plugin loader may call this twice.

    Engine cores that are created in this process then also take updates in one call. Both halves
    are loaded when they are used.
    """
    from vllm.distributed.weight_transfer import (
        WeightTransferEngineFactory as Factory,
    )
    from vllm.distributed.weight_transfer import (
        WeightTransferTrainerFactory as Trainers,
    )

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "deltasync.integrations.vllm_engine", "DeltaSyncEngine")
    if BACKEND not in Trainers._registry:
        Trainers.register_engine(BACKEND, "deltasync.integrations.vllm_trainer", "DeltaSyncTrainer")
    vllm_core.register()


class Client(Protocol):
    """Calls that reach every worker of a server, with the names of vLLM's own clients.

    A `VllmServer` also needs `clear_cache` to clear caches. An update takes one call if the client
    has `collective_rpc(method, *args)`, which returns a list as vLLM's own does.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> object: ...

    def start_weight_update(self) -> object: ...

    def update_weights(self, update_info: dict[str, Any], /) -> object: ...

    def finish_weight_update(self, weight_version: str | None = None) -> object: ...


class OfflineClient:
    """Client of an `LLM` in this process, which generates only on request: no pause is needed."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any], /) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def collective_rpc(self, method: str, *args: object) -> Any:
        return self._llm.collective_rpc(method, args=args)

    def clear_cache(self) -> None:
        """Drop what weights computed: keys and values, cached or of requests, and encodings."""
        _check_cleared(self._llm.reset_prefix_cache(True, True))
        self._llm.llm_engine.reset_encoder_cache()


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

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any], /) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._wait(self._engine.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._engine.finish_weight_update(weight_version))

    def collective_rpc(self, method: str, *args: object) -> Any:
        return self._wait(self._engine.collective_rpc(method, args=args))

    def clear_cache(self) -> None:
        """Like `OfflineClient.clear_cache`. Requests continue after a recomputation."""
        _check_cleared(self._wait(self._engine.reset_prefix_cache(True, True)))
        self._wait(self._engine.reset_encoder_cache())

    @contextmanager
    def paused(self, mode: PauseMode = "keep") -> Iterator[None]:
        """Pause generation; resume it afterwards unless a part of the engine sleeps.

        If the pause fails, the engine may have paused all the same, and is resumed too.

        Args:
            mode: As vLLM's.
        """
        try:
            self._wait(self._engine.pause_generation(mode=mode, clear_cache=False))
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

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> None:
        self._http.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._http.post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any], /) -> None:
        self._http.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        named = None if weight_version is None else {"weight_version": weight_version}
        self._http.post("finish_weight_update", named)

    def workers(self) -> int:
        """Return the number of server processes that hold weights."""
        return self._http.value_of(self._http.get("get_world_size"), "world_size", int)

    def collective_rpc(self, method: str, *args: object) -> Any:
        answer = self._http.post("collective_rpc", {"method": method, "args": args})
        return self._http.value_of(answer, "results", list)

    def clear_cache(self) -> None:
        """Like `AsyncClient.clear_cache`."""
        answer = self._http.post(
            "reset_prefix_cache", reset_running_requests=True, reset_external=True
        )
        _check_cleared(self._http.value_of(answer, "success", bool))
        self._http.post("reset_encoder_cache")

    @contextmanager
    def paused(self, mode: PauseMode = "keep") -> Iterator[None]:
        """Pause generation; resume it afterwards unless a part of the engine sleeps.

        If the pause fails, the engine may have paused all the same, and is resumed too.

        Args:
            mode: As vLLM's.
        """
        try:
            self._http.post("pause", mode=mode, clear_cache=False)
            yield
        finally:
            self._http.post("wake_up", tags=_SCHEDULING[0])


class VllmServer:
    """vLLM as a `Server`. An update is one call, or several that do not pause; see `reach`.

    Args:
        client: One of the clients above, or one of vLLM's own, which have no `clear_cache`. If it
            reaches several engines, each of its calls has to reach them at the same time.
        caches: "clear" drops in each update what the old weights computed: cached prefixes, keys
            and values of requests that are kept (vLLM recomputes them), and encodings of images.
            "keep": prompts continue with keys and values of old weights for as long as vLLM keeps
            them.

    Raises:
        ConfigError: The client cannot do that.
    """

    def __init__(self, client: Client, *, caches: Caches = "clear") -> None:
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
            if self._clear_cache is None:
                raise ConfigError(
                    f"{type(client).__name__} has no clear_cache, so prompts would go on with keys "
                    'and values of old weights: give it one, or say caches="keep"'
                )

    def connect(self, trainer: dict[str, Any], /) -> None:
        self._is_stale = True  # an earlier trainer may have ended before it could clear them
        self._client.init_weight_transfer_engine({"trainer": trainer})

    def update(self, version: int, holder: str, /) -> None:
        self._is_stale = True
        self._update({"version": version, "holder": holder})
        self._clear()

    def name(self, version: int, holder: str, /) -> None:
        self._clear()  # does nothing if the update has done it
        what = {"version": version, "holder": holder, "work": "name"}
        self._update(what, weight_version=str(version))

    def _update(self, what: dict[str, Any], **named: str) -> None:
        """Also finish an update that breaks off: workers that did not fail wait for that."""
        try:
            self._client.start_weight_update()
            self._client.update_weights(what)
            self._client.finish_weight_update(**named)
        except BaseException as error:
            try:
                self._client.finish_weight_update()
            except Exception as other:  # it had not begun, or the server is gone
                raise error from other
            raise

    def reach(self, paused: Callable[[], object], /) -> int:
        """Ask how many workers `switch` updates. Returns 0 if it must not be used.

        Args:
            paused: How the caller pauses generation. `switch` replaces the client's `paused` with
                its default mode, and pausing not at all.
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
        self._client.init_weight_transfer_engine({"holder": holder})

    def _clear(self) -> None:
        if self._is_stale and self._clear_cache is not None:
            self._clear_cache()
        self._is_stale = False


def _check_cleared(is_cleared: object) -> None:
    if not is_cleared:
        raise EngineFailed(NOT_CLEARED)
