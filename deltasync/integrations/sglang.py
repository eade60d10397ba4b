"""SGLang's workers, and the trainer's end, which does not import SGLang.

If deltasync is installed next to a server, the server takes requests for its workers through its
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

from deltasync.engines.proof.cold import Startup, default_dtype
from deltasync.engines.proof.proving import Proof
from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.http import Http
from deltasync.integrations.trainer_info import TrainerInfo, WorkerRequest
from deltasync.integrations.worker import Worker

PauseMode = Literal["abort", "retract", "in_place"]

REQUEST = "deltasync"
"""The key of a request, where a ParameterServer sends a device uuid and its socket."""

NOT_YET = "deltasync: done, and the weights that this server waits for come with the first version"

_WORKERS: WeakKeyDictionary[nn.Module, Worker] = WeakKeyDictionary()
# Responses of servers whose workers take no requests: a route, a package or a device is missing.
_WITHOUT_US = ("checkpoint-engine is not installed", "not found in zmq_handles")
# Settings of servers that keep prefixes outside their own memory.
_STORES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")


class Extension:
    """Takes requests in the place of SGLang's own extension, without checkpoint-engine.

    SGLang creates one for each update.

    Args:
        model_runner: SGLang's model runner in this worker.
    """

    def __init__(self, model_runner: Any) -> None:
        self._model_runner = model_runner

    def update_weights_from_ipc(self, zmq_handles: Mapping[str, str]) -> None:
        """Do what a trainer requests. SGLang answers with the error that this raises."""
        if REQUEST not in zmq_handles:
            raise EngineFailed("to take a ParameterServer's checkpoints, install checkpoint-engine")
        handle_request(self._model_runner, zmq_handles[REQUEST])


def handle_request(model_runner: Any, text: str) -> None:
    """Do what a `WorkerRequest`, as JSON, asks of a worker: connect, commit or disconnect.

    Raises EngineFailed with the type and the text of the error. A server counts as ready after its
    first successful update, so an update without weights raises too if the server waits for them.
    """
    from sglang.srt.runtime_context import get_server_args

    if model_runner.is_draft_worker:  # which keeps its weights
        return
    try:
        request = WorkerRequest.model_validate_json(text)
        worker = worker_of(model_runner.model)
        if request.trainer is not None:
            _connect(worker, model_runner.model, request.trainer)
        elif request.version is not None:
            worker.commit(request.version, request.holder, work=request.work)
        else:
            worker.disconnect(request.holder)
    except Exception as error:
        text = " ".join(str(error).split())  # on one line
        raise EngineFailed(f"deltasync: {type(error).__name__}: {text}") from error
    if request.version is None and get_server_args().checkpoint_engine_wait_weights_before_ready:
        raise EngineFailed(NOT_YET)


def worker_of(model: nn.Module) -> Worker:
    """Return the model's worker, which lives as long as the model."""
    return _WORKERS.setdefault(model, Worker())


def _connect(worker: Worker, model: nn.Module, trainer: TrainerInfo) -> None:
    try:
        worker.check_awake()
        if trainer.without_routes != "refuse":
            raise ConfigError(
                f'SGLang\'s workers cannot do without_routes="{trainer.without_routes}": leave it '
                'at "refuse", and weights without a route are named'
            )
        target = worker.routed(model, trainer, lambda: _started_on(model), lambda: _proof(model))
        worker.connect(trainer, target, _device_of(model), **_place())
    except Exception as error:
        worker.decline(trainer, _device_of(model), error)
        raise


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _place() -> dict[str, Any]:
    """The rank of this worker and the number of workers in its engine."""
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
    """A second model, made as SGLang made this one."""
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model

    config, load_config = _configs()
    with default_dtype(config.dtype), torch.device(_device_of(model)):
        quantization = _get_quantization_config(config, load_config)
        made: nn.Module = _initialize_model(config, load_config, quantization)
        return made.eval()


def _work_on(modules: Sequence[nn.Module]) -> None:
    """Process modules as SGLang does after it has loaded them."""
    for module in modules:
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)


def _configs() -> tuple[Any, Any]:
    """The configurations of the model and of its loader."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    load_config = LoadConfig(load_format=arguments.load_format, download_dir=arguments.download_dir)
    return ModelConfig.from_server_args(arguments), load_config


def _started_on(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Read the checkpoint that SGLang was started on. Raises ConfigError without one."""
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
        caches: "clear" drops in each update what the old weights computed: cached prefixes, keys
            and values of requests that are kept (SGLang recomputes them), and encodings of images.
            "keep": prompts continue with keys and values of old weights for as long as SGLang
            keeps them.
        timeout_s: For each call.

    Raises:
        ConfigError: It is another server, or has several data-parallel replicas, or caches are to
            be cleared and it also keeps prefixes where no update reaches them, or `caches` is
            neither.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        caches: Literal["clear", "keep"] = "clear",
        timeout_s: float = 300.0,
    ) -> None:
        if caches not in ("clear", "keep"):
            raise ConfigError(f'caches is {caches!r}: SGLang takes "clear" or "keep"')
        self._http = Http(url, api_key=api_key, timeout_s=timeout_s, of="SGLang")
        self.url = self._http.url
        self._clears = caches == "clear"
        self._is_stale = False  # caches may hold results of older weights
        info = self._http.get("server_info")
        sizes = (self._http.value_of(info, f"{name}_size", int) for name in ("dp", "tp", "pp"))
        replicas, shards, stages = sizes
        if replicas != 1:
            raise ConfigError("SGLang updates no weights of several data-parallel replicas")
        if self._clears and (stores := [name for name in _STORES if info.get(name)]):
            raise ConfigError(
                f"the server keeps prefixes where no update clears them ({', '.join(stores)}), so "
                "that prompts would go on with keys and values of old weights: start it without, "
                'or say caches="keep"'
            )
        self.workers = shards * stages
        self._is_pipelined = stages != 1

    def connect(self, trainer: dict[str, Any], /) -> None:
        """Let each worker connect. A worker that cannot reports that to the trainer directly."""
        self._is_stale = True  # an earlier trainer may have ended before it could clear them
        self._request(WorkerRequest(trainer=TrainerInfo.model_validate(trainer)))

    def update(self, version: int, holder: str, /) -> None:
        self._is_stale = True
        self._request(WorkerRequest(version=version, holder=holder))

    def name(self, version: int, holder: str, /) -> None:
        """Name the version by an update that writes nothing: SGLang's own call names no trainer."""
        self._request(WorkerRequest(version=version, holder=holder, work="name"))

    def disconnect(self, holder: str, /) -> None:
        self._request(WorkerRequest(holder=holder))

    @contextmanager
    def paused(self, mode: PauseMode = "retract") -> Iterator[None]:
        """Pause generation, and resume it afterwards.

        If the pause fails, the server may have paused all the same, and is resumed too.

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
        try:
            self._http.post("pause_generation", {"mode": mode})
            yield
        finally:
            self._http.post("continue_generation", {})

    def _request(self, request: WorkerRequest) -> None:
        """Send a request to each worker. One with a version drops from their caches what older
        versions computed. Raises EngineFailed, or ConfigError if they take none.
        """
        has_version = request.version is not None
        body = {
            "zmq_handles": {REQUEST: request.model_dump_json()},
            "flush_cache": has_version and self._is_stale and self._clears,
            "weight_version": str(request.version) if request.work == "name" else None,
        }
        try:
            self._http.post("update_weights_from_ipc", body)
        except EngineFailed as error:
            if NOT_YET in str(error):
                return
            if error.status == 404 or any(said in str(error) for said in _WITHOUT_US):
                raise ConfigError(
                    "the server takes no requests: install deltasync in SGLang's environment, name "
                    "it in SGLANG_PLUGINS if that is set there, and see the server's log for why "
                    f"it was not loaded ({error})"
                ) from error
            raise
        self._is_stale = self._is_stale and not has_version
