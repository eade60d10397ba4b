"""The weight transfer backend that runs inside vLLM's workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.integrations.connection import Connection, SentTensors
from deltasync.integrations.worker import Worker
from deltasync.sync.module import Registered
from deltasync.sync.proof.cold import Startup
from deltasync.sync.proof.proving import Proof, reached
from deltasync.sync.target.base import WeightTarget
from deltasync.sync.target.reloaded import ReloadedTarget

logger = init_logger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the trainer says when it connects: a `Connection`, as JSON."""

    connection: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Asks for the version that is staged, or about to be received, to be written."""

    version: int


class DeltaSyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives and stages in a thread while the worker generates; an update only writes."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker = Worker()
        self._connection: Connection | None = None  # to be made again when weights are back
        _announce_touches(resolve_obj_by_qualname(self.parallel_config.worker_cls))
        self._reloads: set[SentTensors] = set()  # of which reloading is proved
        self._reached = reached(self.model)  # before there are caches

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer. A connection to another one is ended.

        Raises ConfigError, by name, for tensors that have no route, or are not where it leads; or,
        where the trainer wants them reloaded, for those that are not the same then; DirtyReceiver
        as `Worker.proving`. What it raises it also tells the trainer, since vLLM's processes pass
        on no types.
        """
        connection = Connection.model_validate(init_info.connection)
        try:
            self._worker.check_awake()
            self.shutdown()
            self._connect(connection)
        except Exception as error:
            self._worker.decline(connection, self.device, error)
            raise
        self._connection = connection

    def _connect(self, connection: Connection) -> None:
        """Raises ConfigError."""
        parallel = self.parallel_config
        if parallel.enable_eplb:
            raise ConfigError("vLLM moves experts between ranks: start it without --enable-eplb")
        self._worker.connect(
            connection,
            self._target(connection),
            self.device,
            rank=parallel.rank,
            world=parallel.world_size,
            replica=parallel.data_parallel_index,
        )

    def _target(self, connection: Connection) -> WeightTarget:
        """By routes, or by reloading. Raises ConfigError."""
        try:
            return self._worker.routed(self.model, connection, self._started_on, self._proof)
        except ConfigError as error:
            if connection.without_routes == "refuse":
                raise
            logger.warning("deltasync reloads all weights in every update: %s", error)
            return self._reloaded(connection)

    def _reloaded(self, to: Connection) -> ReloadedTarget:
        """What the worker holds is known only when it has just been started."""
        if any(map(_is_lost_by_reload, self.model.modules())):
            raise ConfigError(
                "vLLM's reload leaves int8 matrices on CPUs without their scales: weights of such "
                "engines cannot be replaced"
            )
        target = ReloadedTarget(to.checkpoint(), self._reload, module=self.model)
        if to.sent() not in self._reloads:
            if self._worker.is_written:
                raise ConfigError(
                    "a trainer of other tensors has written this engine, so that nothing shows "
                    "what it makes of these when it reloads them: restart the engine, and connect "
                    "first with all tensors that are to be sent"
                )
            target.set_loaded_weights(self._started_on())
            if to.unproved == "refuse":
                with self._worker.proving(), set_current_vllm_config(self.vllm_config):
                    target.verify_reload(self._proof(), keep=to.keep)
            self._reloads.add(to.sent())
        return target

    def _proof(self) -> Proof:
        """Raises ConfigError if there can be no second instance of the model."""
        return Proof(self.model, Startup(self._make, work_on=self._work_on), self._reached)

    def _make(self) -> nn.Module:
        """A model as vLLM has made its own, of which its engine knows nothing."""
        config, compilation = copy(self.vllm_config), copy(self.vllm_config.compilation_config)
        compilation.static_forward_context = {}  # else it has each layer's name already
        config.compilation_config = compilation
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.model_config.dtype)
        try:
            with torch.device(self.device):
                model: nn.Module = initialize_model(config, model_config=self.model_config)
                return model.eval()
        finally:
            torch.set_default_dtype(default)

    def _work_on(self, modules: Sequence[nn.Module]) -> None:
        """What vLLM does with modules when it has loaded them: attention last."""
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            for module in modules:
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase):
                    method.process_weights_after_loading(module)
            for module in modules:
                work = getattr(module, "process_weights_after_loading", None)
                if work is not None and not isinstance(module, QuantizeMethodBase):
                    work(self.model_config.dtype)

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As vLLM's own backends do that bring whole checkpoints, and what they leave out."""
        packing, registered = _Packing(self.model), Registered(self.model)
        packing.forget()
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:  # vLLM would go on with what is left of this one the next time
            registered.put_back()
            packing.remember()
            for module in self.model.modules():
                get_layerwise_info(module).reset()
            raise
        packing.renew()

    def _started_on(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint that vLLM has loaded, and worked on since. Raises ConfigError."""
        loader = get_model_loader(self.vllm_config.load_config)
        if not isinstance(loader, DefaultModelLoader):
            raise ConfigError(
                "start vLLM on a checkpoint: only reading it back tells whether vLLM keeps weights "
                "where it loads them"
            )
        weights: Iterator[tuple[str, Tensor]] = loader.get_all_weights(
            self.model_config, self.model
        )
        return weights

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """What vLLM 0.26 wants to be there. Trainers use an `EngineSync`."""
        raise NotImplementedError("send weights by deltasync's EngineSync")

    def start_weight_update(self) -> None:
        """Nothing is to be prepared."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """`Worker.commit`."""
        self._worker.commit(update_info.version)

    def finish_weight_update(self) -> None:
        """Everything is written already."""

    def shutdown(self) -> None:
        """End the connection. The weights stay as they are."""
        self._connection = None
        self._worker.disconnect()

    def sleep(self, *, discards: bool) -> None:
        """Weights are about to be released; if they are not discarded `wake` finds them again."""
        if discards:
            self._worker.disconnect()
        self._worker.sleep()

    def wake(self) -> None:
        """Weights are where they were, or what has become of discarded ones."""
        self._worker.wake()
        self.come_back()

    def leave(self) -> None:
        """Somebody else is about to write weights: vLLM itself."""
        self._worker.disconnect()

    def come_back(self) -> None:
        """Connect to the trainer that was left, which would wait for this worker. Never raises: a
        worker that cannot says so when the trainer connects it.
        """
        if self._connection is None or self._worker.is_connected:
            return
        try:
            self._worker.check_awake()
            self._connect(self._connection)
        except (DeltaSyncError, RuntimeError, OSError) as error:
            logger.warning("deltasync: this worker is not connected any more: %s", error)

    def reloaded(self) -> None:
        """`Worker.reloaded`."""
        self._connection = None
        self._worker.reloaded()


def _is_lost_by_reload(module: Any) -> bool:
    """Whether it works with a oneDNN handler, which points to a scale that the reload lets go."""
    kernel = getattr(getattr(module, "scheme", None), "kernel", None)
    return hasattr(kernel, "dnnl_handler")


@contextmanager
def _sleeping(engine: DeltaSyncEngine, level: int = 1) -> Iterator[None]:
    engine.sleep(discards=level > 1)
    yield


@contextmanager
def _discarding(engine: DeltaSyncEngine, tags: Collection[str]) -> Iterator[None]:
    if _WEIGHTS in tags:
        engine.sleep(discards=True)
    yield


@contextmanager
def _waking(engine: DeltaSyncEngine, tags: Collection[str] | None = None) -> Iterator[None]:
    yield
    if tags is None or _WEIGHTS in tags:
        engine.wake()


@contextmanager
def _reloading(engine: DeltaSyncEngine, *_: object, **__: object) -> Iterator[None]:
    engine.leave()
    yield
    engine.come_back()


@contextmanager
def _loading(engine: DeltaSyncEngine, *_: object, **__: object) -> Iterator[None]:
    engine.reloaded()
    yield


_WEIGHTS = "weights"
_Around = Callable[..., AbstractContextManager[None]]
_TOUCHES: dict[str, _Around] = {
    "sleep": _sleeping,
    "wake_up": _waking,
    "discard": _discarding,
    "reload_weights": _reloading,
    "reset_weights": _reloading,
}
_LOADS: dict[str, _Around] = {  # of checkpoint-engine's extension, if there is one
    "update_weights_from_ipc": _loading,
}


def _announce_touches(worker_class: type) -> None:
    """Let the backend know when workers touch weights themselves, of which vLLM tells none.

    Weights that sleep must not be looked at, and may be others after.
    """
    for name, around in (_TOUCHES | _LOADS).items():
        method = getattr(worker_class, name, None)
        if method is not None and not hasattr(method, "is_announced"):
            setattr(worker_class, name, _announced(method, around))


def _announced(method: Callable[..., object], around: _Around) -> Callable[..., object]:
    @wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> object:
        engine = worker.weight_transfer_engine
        if not isinstance(engine, DeltaSyncEngine):
            return method(worker, *args, **kwargs)
        with around(engine, *args, **kwargs):
            return method(worker, *args, **kwargs)

    call.is_announced = True  # type: ignore[attr-defined]
    return call


class _Packing:
    """Weights packed for CPUs, of which vLLM's layerwise reload leaves some as they were loaded."""

    def __init__(self, model: nn.Module) -> None:
        modules: Iterable[Any] = model.modules() if current_platform.is_cpu() else ()
        self._packed = [m for m in modules if getattr(m, "quant_method", None) is not None]
        experts = [m.quant_method for m in self._packed if hasattr(m.quant_method, "moe_kernel")]
        self._kernels = [(method, method.moe_kernel) for method in experts]

    def forget(self) -> None:
        """Let experts be packed again: a kernel that is there already is not asked to."""
        for method, _ in self._kernels:
            method.moe_kernel = None

    def remember(self) -> None:
        """Take back what was forgotten."""
        for method, kernel in self._kernels:
            method.moe_kernel = kernel

    def renew(self) -> None:
        """Pack heads again that keep their weight beside: a tied one is given no weights."""
        for module in self._packed:
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
