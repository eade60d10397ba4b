"""SGLang's custom weight loader, and the trainer's end, which does not import SGLang.

A server is started with `--custom-weight-loader deltasync.integrations.sglang.load`. The trainer
drives it by an `EngineSync` of a `SglangServer`. What goes through SGLang's own update of weights
is no more than an order of a few bytes; weights go from the trainer to each worker directly.
"""

from __future__ import annotations

import base64
import logging
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.connection import Connection, Order
from deltasync.integrations.http import Http
from deltasync.integrations.worker import Worker

LOADER = "deltasync.integrations.sglang.load"
PauseMode = Literal["abort", "retract", "in_place"]

logger = logging.getLogger(__name__)
_WORKER = "_deltasync_worker"


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader. It never raises: that would end the server.

    The trainer learns of failures from the worker itself: one that cannot take part says so when
    it should connect, and one that does not write a version leaves.

    Args:
        model: The worker's.
        named_tensors: One: uint8[n], an `Order` as JSON.
    """
    try:
        [(_, data)] = named_tensors
        if not isinstance(data, Tensor) or (data.dtype, data.dim()) != (torch.uint8, 1):
            raise ConfigError("an order is a tensor uint8[n]")
        obey(model, Order.model_validate_json(bytes(data.cpu().numpy())))
    except Exception:
        logger.exception("deltasync: the order was not carried out, weights are as they were")


def worker_of(model: nn.Module) -> Worker:
    """The one that lives as long as the model."""
    worker: Worker = vars(model).setdefault(_WORKER, Worker())
    return worker


def obey(model: nn.Module, order: Order) -> None:
    """Carry out an order in a worker of SGLang's. Raises what is wrong with it, or a commit."""
    worker = worker_of(model)
    if order.version is not None:
        worker.commit(order.version)
    else:
        worker.disconnect()
    if order.connection is not None:
        _connect(worker, model, order.connection)


def _connect(worker: Worker, model: nn.Module, to: Connection) -> None:
    try:
        target = worker.routed(model, to, lambda: _started_on(model), finish=_finish_of(model))
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


def _finish_of(model: nn.Module) -> Any:
    """Brings up to date what a model derives from its weights, as DeepSeek's attention does."""
    return getattr(model, "post_load_weights", lambda: None)


def _started_on(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint that SGLang has loaded, and worked on since. Raises ConfigError."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model_loader
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    config = ModelConfig.from_server_args(arguments)
    loader = get_model_loader(
        LoadConfig(load_format=arguments.load_format, download_dir=arguments.download_dir), config
    )
    if not isinstance(loader, DefaultModelLoader):
        raise ConfigError(
            "start SGLang on a checkpoint: only reading it back tells whether it keeps weights "
            "where it loads them"
        )
    weights: Iterator[tuple[str, Tensor]] = loader._get_all_weights(config, model)
    return weights


class SglangServer:
    """SGLang as a `Server`, over HTTP. Versions before 0.5.21 have no sessions: it finds that out.

    SGLang lets an update wait until no request runs, unless generation is paused: give the
    `EngineSync` this object's `paused`.

    Args:
        url: Of the server: scheme, host and port.
        api_key: If it wants one.
        flush_cache: Drop cached prefixes at each update. That fails while requests are kept.
        timeout_s: For each call.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        flush_cache: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = Http(url, headers=headers, timeout_s=timeout_s)
        self._flush_cache = flush_cache
        info = self._http.get("server_info")
        self._check_started(info)
        if info["dp_size"] != 1:
            raise ConfigError("SGLang updates no weights of several data-parallel replicas")
        self._tensor_parallel = int(info["tp_size"])
        self.workers = self._tensor_parallel * int(info["pp_size"])

    def _check_started(self, info: dict[str, Any]) -> None:
        """Whether its workers take orders. Raises ConfigError."""
        if LOADER not in (info.get("custom_weight_loader") or ()):
            raise ConfigError(f"start SGLang with --custom-weight-loader {LOADER}")

    def connect(self, connection: dict[str, Any], /) -> None:
        """Let each worker connect. One that cannot says so to the trainer itself."""
        self._give(Order(connection=Connection.model_validate(connection)))

    def update(self, version: int, /) -> None:
        self._give(Order(version=version))

    def name(self, version: int, /) -> None:
        named = {"new_version": str(version), "abort_all_requests": False}
        self._http.post("update_weight_version", named)

    def disconnect(self) -> None:
        self._give(Order())

    @contextmanager
    def paused(self, mode: PauseMode = "in_place") -> Iterator[None]:
        """Pause generation, and resume it. "in_place" keeps requests and their cache."""
        self._http.post("pause_generation", {"mode": mode})
        try:
            yield
        finally:
            self._http.post("continue_generation", {})

    def _give(self, order: Order) -> None:
        """Hand an order to the loader of each worker. Raises EngineFailed."""
        text = base64.b64encode(_named_tensor(order.model_dump_json().encode())).decode()
        body = {
            "serialized_named_tensors": [text] * self._tensor_parallel,
            "load_format": LOADER,
            "flush_cache": self._flush_cache,
            "selector": "target",  # not the draft model; what that was called before follows
            "disable_draft_model": True,
        }
        with self._session():
            self._http.post("update_weights_from_tensor", body)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Where there are sessions, in one."""
        try:
            self._http.post("begin_weight_update", {"selector": "target"})
        except EngineFailed as error:
            if error.status != 404:
                raise
            yield
            return
        try:
            yield
        finally:
            self._http.post("end_weight_update", {})


def _named_tensor(data: bytes) -> bytes:
    """[("deltasync", torch.ByteTensor(bytearray(data)))] as SGLang reads it: in a pickle's format.

    Its operations, as Python's pickletools names them: PROTO, EMPTY_LIST, BINUNICODE, GLOBAL,
    BYTEARRAY8, TUPLE1, REDUCE, TUPLE2, APPEND, STOP.
    """
    name = b"deltasync"
    return b"".join(
        (
            b"\x80\x05]",
            b"X" + struct.pack("<I", len(name)) + name,
            b"ctorch\nByteTensor\n",
            b"\x96" + struct.pack("<Q", len(data)) + data,
            b"\x85R\x86a.",
        )
    )
