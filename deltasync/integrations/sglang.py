"""SGLang's workers, and the trainer's end, which does not import SGLang.

If deltasync is installed next to a server, the server takes small requests (orders) through its
route `/update_weights_from_ipc`. This route neither opens an update session nor processes the
weights afterwards. The trainer uses an `EngineSync` of a `SglangServer`. Weights go directly from
the trainer to each worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.connection import Connection, Order
from deltasync.integrations.http import Http
from deltasync.integrations.worker import Worker
from deltasync.sync.proof.cold import Startup
from deltasync.sync.proof.proving import Proof

PauseMode = Literal["abort", "retract", "in_place"]

ORDER = "deltasync"
"""The key of an order, where a ParameterServer sends a device uuid and its socket."""

NOT_YET = "deltasync: done, and the weights that this server waits for come with the first version"

_WORKERS: WeakKeyDictionary[nn.Module, Worker] = WeakKeyDictionary()
# Responses of servers whose workers take no orders: a route, a package or a device is missing.
_WITHOUT_US = ("404 ", "checkpoint-engine is not installed", "not found in zmq_handles")
# Settings of servers that keep prefixes outside their own memory.
_STORES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")


class Extension:
    """Takes orders in the place of SGLang's own extension. SGLang creates one for each update.

    Args:
        model_runner: SGLang's model runner in this worker.
    """

    def __init__(self, model_runner: Any) -> None:
        self._model_runner = model_runner

    def update_weights_from_ipc(self, zmq_handles: Mapping[str, str]) -> None:
        """Carry out a trainer's order. SGLang returns what this raises, and goes on."""
        if ORDER not in zmq_handles:
            raise EngineFailed(
                "checkpoint-engine cannot be imported beside SGLang: install it there to take the "
                "checkpoints of a ParameterServer"
            )
        take_order(self._model_runner, zmq_handles[ORDER])


def take_order(model_runner: Any, text: str) -> None:
    """Carry out an `Order` as JSON in a worker. Raises EngineFailed, which says what was raised.

    A server is ready when an update succeeds, so one that brings no weights must not.
    """
    from sglang.srt.runtime_context import get_server_args

    if model_runner.is_draft_worker:  # which keeps its weights
        return
    try:
        order = Order.model_validate_json(text)
        obey(model_runner.model, order)
    except Exception as error:
        said = " ".join(str(error).split())  # on one line
        raise EngineFailed(f"deltasync: {type(error).__name__}: {said}") from error
    if order.version is None and get_server_args().checkpoint_engine_wait_weights_before_ready:
        raise EngineFailed(NOT_YET)


def worker_of(model: nn.Module) -> Worker:
    """The one that lives as long as the model."""
    return _WORKERS.setdefault(model, Worker())


def obey(model: nn.Module, order: Order) -> None:
    """Carry out an order in a worker of SGLang's. Raises what is wrong with it, or a commit."""
    worker = worker_of(model)
    if order.connection is not None:
        _connect(worker, model, order.connection)
    elif order.version is not None:
        worker.commit(order.version)
    else:
        worker.disconnect()


def _connect(worker: Worker, model: nn.Module, to: Connection) -> None:
    try:
        worker.check_awake()
        worker.disconnect()
        if to.without_routes != "refuse":
            raise ConfigError(
                f'SGLang\'s workers cannot do without_routes="{to.without_routes}": leave it at '
                '"refuse", and weights without a route are named'
            )
        target = worker.routed(model, to, lambda: _started_on(model), lambda: _proof(model))
        worker.connect(to, target, _device_of(model), **_place())
    except Exception as error:
        worker.decline(to, _device_of(model), error)
        raise


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _place() -> dict[str, Any]:
    """Of this worker in its engine."""
    from sglang.srt.distributed import parallel_state as parallel

    shards = parallel.get_tensor_model_parallel_world_size()
    rank = parallel.get_pipeline_model_parallel_rank() * shards
    rank += parallel.get_tensor_model_parallel_rank()
    world = shards * parallel.get_pipeline_model_parallel_world_size()
    return {"rank": rank, "world": world}


def _proof(model: nn.Module) -> Proof:
    """Raises ConfigError if there can be no second instance of the model."""
    return Proof(model, Startup(lambda: _made_like(model), work_on=_work_on))


def _made_like(model: nn.Module) -> nn.Module:
    """A model as SGLang has made this one."""
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model

    config, load_config = _configs()
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device(_device_of(model)):
            quantization = _get_quantization_config(config, load_config)
            made: nn.Module = _initialize_model(config, load_config, quantization)
            return made.eval()
    finally:
        torch.set_default_dtype(default)


def _work_on(modules: Sequence[nn.Module]) -> None:
    """What SGLang does with modules when it has loaded them."""
    for module in modules:
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)


def _configs() -> tuple[Any, Any]:
    """Of the model, and of loading it."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    load_config = LoadConfig(load_format=arguments.load_format, download_dir=arguments.download_dir)
    return ModelConfig.from_server_args(arguments), load_config


def _started_on(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint that SGLang has loaded, and worked on since. Raises ConfigError."""
    from sglang.srt.model_loader import get_model_loader
    from sglang.srt.model_loader.loader import DefaultModelLoader

    config, load_config = _configs()
    loader = get_model_loader(load_config, config)
    if not isinstance(loader, DefaultModelLoader):
        raise ConfigError(
            "start SGLang on a checkpoint: only reading it back tells whether it keeps weights "
            "where it loads them"
        )
    weights: Iterator[tuple[str, Tensor]] = loader._get_all_weights(config, model)
    return weights


class SglangServer:
    """SGLang as a `Server`, over HTTP.

    SGLang delays an update until no request runs, unless generation is paused: pass this object's
    `paused` to the `EngineSync`.

    Args:
        url: The server's scheme, host and port.
        api_key: The server's key, if it needs one.
        clear_cache: In each update, drop what the old weights computed: cached prefixes, keys and
            values of requests that are kept (SGLang recomputes them), and encodings of images.
            Otherwise prompts continue with keys and values of old weights for as long as SGLang
            keeps them.
        timeout_s: For each call.

    Raises:
        ConfigError: The server has several data-parallel replicas, or `clear_cache` is set and the
            server also keeps prefixes where no update reaches them.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        clear_cache: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = Http(url, headers=headers, timeout_s=timeout_s)
        self._clear_cache = clear_cache
        self._is_stale = False  # caches may hold results of older weights
        info = self._http.get("server_info")
        if info["dp_size"] != 1:
            raise ConfigError("SGLang updates no weights of several data-parallel replicas")
        if clear_cache and (stores := [name for name in _STORES if info.get(name)]):
            raise ConfigError(
                f"the server keeps prefixes where no update clears them ({', '.join(stores)}), so "
                "that prompts would go on with keys and values of old weights: start it without, "
                "or say clear_cache=False"
            )
        self.workers = int(info["tp_size"]) * int(info["pp_size"])
        self._is_pipelined = info["pp_size"] != 1

    def connect(self, connection: dict[str, Any], /) -> None:
        """Let each worker connect. A worker that cannot reports that to the trainer directly."""
        self._give(Order(connection=Connection.model_validate(connection)))

    def update(self, version: int, /) -> None:
        self._is_stale = True
        self._write(version)

    def name(self, version: int, /) -> None:
        if self._is_stale:  # the last update failed
            self._write(version)
        named = {"new_version": str(version), "abort_all_requests": False}
        self._http.post("update_weight_version", named)

    def disconnect(self) -> None:
        self._give(Order())

    @contextmanager
    def paused(self, mode: PauseMode = "retract") -> Iterator[None]:
        """Pause generation, and resume it afterwards.

        Args:
            mode: "in_place" lets requests keep their keys and values if no cache is cleared,
                "retract" recomputes them, "abort" ends requests.

        Raises ConfigError for "in_place" and "retract" with pipeline stages.
        """
        if self._is_pipelined and mode != "abort":
            raise ConfigError(
                f'SGLang does not pause pipeline stages with mode="{mode}": use mode="abort", or '
                "leave out `paused`, and updates wait until no request runs"
            )
        self._http.post("pause_generation", {"mode": mode})
        try:
            yield
        finally:
            self._http.post("continue_generation", {})

    def _write(self, version: int, *, weight_version: str | None = None) -> None:
        """Let workers write a version, and drop from their caches what older ones computed."""
        clears = self._is_stale and self._clear_cache
        self._give(Order(version=version), flush_cache=clears, weight_version=weight_version)
        self._is_stale = False

    def _give(
        self, order: Order, *, flush_cache: bool = False, weight_version: str | None = None
    ) -> None:
        """Send an order to each worker. Raises EngineFailed, or ConfigError if they take none."""
        body = {
            "zmq_handles": {ORDER: order.model_dump_json()},
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        try:
            self._http.post("update_weights_from_ipc", body)
        except EngineFailed as error:
            if NOT_YET in str(error):
                return
            if any(said in str(error) for said in _WITHOUT_US):
                raise ConfigError(
                    "the server takes no orders: install deltasync in SGLang's environment, name "
                    "it in SGLANG_PLUGINS if that is set there, and see the server's log for why "
                    f"it was not loaded ({error})"
                ) from error
            raise
