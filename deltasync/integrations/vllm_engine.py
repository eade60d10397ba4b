"""The weight transfer backend that runs inside vLLM's workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

from deltasync.engines.proof.cold import FAILURES, Startup, default_dtype
from deltasync.engines.proof.proving import Proof, reached
from deltasync.engines.proof.unwritten import storages
from deltasync.engines.reloaded import ReloadedTarget
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.integrations.trainer_info import SentTensors, TrainerInfo, Work
from deltasync.integrations.vllm_core import TRY, WRITE, attempt, write
from deltasync.integrations.worker import Worker
from deltasync.sync.target.base import WeightTarget

logger = init_logger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Asks workers to connect, or to disconnect.

    Attributes:
        trainer: A `TrainerInfo` as JSON; None to disconnect.
        holder: Who asks to disconnect.
    """

    trainer: dict[str, Any] | None = None
    holder: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Asks workers to write the version that is staged, or about to be received.

    Attributes:
        version, holder, work: As of `Worker.commit`.
    """

    version: int
    holder: str
    work: Work = "write"


class DeltaSyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives and stages in a thread while the worker generates; an update only writes."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker = Worker()
        _wrap_touches(resolve_obj_by_qualname(self.parallel_config.worker_cls))
        self._name = _name_of_engine()
        self._reloads: dict[SentTensors, ReloadedTarget] = {}  # the last, whose reload is proved
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        modules = set(self.model.modules())  # each layer holds that list, where a drafter's are too
        self._drafter = [one for one in layers if one not in modules]
        self._reached = reached(self.model, self._drafter)  # before there are caches
        self._storages = frozenset(storages(self.model))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer, whose earlier connection ends, or disconnect: vLLM's own call to
        shut down does not say who asks. Then raises EngineTaken as `Worker.disconnect`.

        A refusal is not raised, since vLLM's processes pass on no types. The trainer hears it over
        its own link: a ConfigError, which names the tensor, if a tensor has no route or is not
        where its route leads, or, if the trainer asks for reloads, if a reload changes it; a
        DirtyReceiver as `Worker.proving`; an EngineTaken as `Worker.admit`.
        """
        if init_info.trainer is None:
            self._worker.disconnect(init_info.holder)
            return
        trainer = TrainerInfo.model_validate(init_info.trainer)
        try:
            self._worker.check_awake()
            self._worker.admit(trainer)
            self._connect(trainer)
        except (DeltaSyncError, OSError, *FAILURES) as error:
            why = None if isinstance(error, DeltaSyncError) else error
            logger.warning("deltasync: this worker does not connect: %s", error, exc_info=why)
            self._worker.decline(trainer, self.device, error)

    def _connect(self, trainer: TrainerInfo) -> None:
        """Raises ConfigError."""
        parallel = self.parallel_config
        if parallel.enable_eplb:
            raise ConfigError("vLLM moves experts between ranks: start it without --enable-eplb")
        if self.vllm_config.lora_config is not None:
            raise ConfigError("adapters are beside the weights: start vLLM without --enable-lora")
        self._worker.connect(
            trainer,
            self._target(trainer),
            self.device,
            rank=parallel.rank,
            world=parallel.world_size,
            replica=f"{self._name}-{parallel.data_parallel_index}",
        )

    def _target(self, trainer: TrainerInfo) -> WeightTarget:
        """The weights, written through routes or by a reload. Raises ConfigError."""
        if trainer.without_routes == "reload" and trainer.sent() in self._reloads:
            return self._reloaded(trainer)
        try:
            return self._worker.routed(self.model, trainer, self._started_on, self._proof)
        except ConfigError as error:
            if trainer.without_routes == "refuse":
                raise
            logger.warning("deltasync reloads all weights in every update: %s", error)
            return self._reloaded(trainer)

    def _reloaded(self, trainer: TrainerInfo) -> ReloadedTarget:
        """The weights, written by a reload. Raises ConfigError.

        What the engine holds already is not sent again, and is reloaded once: nothing else shows
        that the engine still computes with it.
        """
        if any(map(_is_lost_by_reload, self.model.modules())):
            raise ConfigError(
                "vLLM's reload leaves int8 matrices on CPUs without their scales: weights of such "
                "engines cannot be replaced"
            )
        sent, is_known = trainer.sent(), self._worker.knows_copy
        if (target := self._reloads.get(sent)) is None:
            if not is_known:
                raise ConfigError(
                    "something else than reloads has written this engine, so that what it holds "
                    "is not known: restart it, and connect first with all that is to be sent"
                )
            target = ReloadedTarget(trainer.checkpoint(), self._reload, module=self.model)
            copies = {n: one for last in self._reloads.values() for n, one in last.held().items()}
            target.set_loaded_weights((n, copies.get(n, one)) for n, one in self._started_on())
        with self._worker.proving(), set_current_vllm_config(self.vllm_config):
            if not is_known:
                target.forget()
            elif sent in self._reloads or trainer.unproved == "accept_stale_weights":
                target.reload()
            else:
                target.verify_reload(self._proof(), keep=trainer.keep)
        self._reloads = {sent: target}
        return target

    def _proof(self) -> Proof:
        """Raises ConfigError if there can be no second instance of the model."""
        startup = Startup(self._make, work_on=self._work_on, others=self._drafter)
        return Proof(self.model, startup, self._reached)

    def _make(self) -> nn.Module:
        """A second model, made as vLLM made its own, and unknown to the engine."""
        config, compilation = copy(self.vllm_config), copy(self.vllm_config.compilation_config)
        compilation.static_forward_context = {}  # else it has each layer's name already
        config.compilation_config = compilation
        with default_dtype(self.model_config.dtype), torch.device(self.device):
            model: nn.Module = initialize_model(config, model_config=self.model_config).eval()
            return model

    def _work_on(self, modules: Sequence[nn.Module]) -> None:
        """Process modules as vLLM does after it has loaded them: attention last."""
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
        """Load weights as vLLM's own backends load whole checkpoints, and do what they omit."""
        packing, registered = _Packing(self.model), _Registered(self.model)
        packing.forget()
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:  # else vLLM's next reload would continue this one
            registered.put_back()
            packing.remember()
            for module in self.model.modules():
                get_layerwise_info(module).reset()
            raise
        packing.renew()

    def _started_on(self) -> Iterator[tuple[str, Tensor]]:
        """Read the checkpoint that vLLM was started on. Raises ConfigError without one."""
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

    def start_weight_update(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write a version: see `Worker.commit`."""
        self._worker.commit(update_info.version, update_info.holder, work=update_info.work)

    def finish_weight_update(self) -> None:
        """Do nothing: everything is written already."""

    def shutdown(self) -> None:
        """End the connection. The weights stay as they are."""
        self._worker.disconnect()

    def sleeping(self, level: int = 1) -> AbstractContextManager[None]:
        """Around `sleep`. Unless it discards the weights, they are found again."""
        return self._worker.released(self.model if level > 1 else None, self._storages)

    def discarding(self, tags: Collection[str]) -> AbstractContextManager[None]:
        """Around `discard`, of what has these tags."""
        return self.sleeping(level=2) if _WEIGHTS in tags else nullcontext()

    @contextmanager
    def waking(self, tags: Collection[str] | None = None) -> Iterator[None]:
        """Around `wake_up`: use weights again, which are back, or were replaced when discarded."""
        yield
        if tags is None or _WEIGHTS in tags:
            self._worker.wake()

    @contextmanager
    def loading(self, *_: object, **__: object) -> Iterator[None]:
        """Around what else writes the weights: see `Worker.reloaded`."""
        self._worker.reloaded()
        yield


def _name_of_engine() -> str:
    """The same for all workers that communicate with each other, and for no others.

    One trainer may send to the workers of several engines: see `VllmServer`.
    """
    name = uuid.uuid4().hex[:8]
    if not torch.distributed.is_initialized():
        return name
    store = torch.distributed.distributed_c10d._get_default_store()
    return str(store.compare_set("deltasync-engine", "", name).decode())


def _is_lost_by_reload(module: Any) -> bool:
    """Whether it uses a oneDNN handler, which points to a scale that the reload frees."""
    kernel = getattr(getattr(module, "scheme", None), "kernel", None)
    return hasattr(kernel, "dnnl_handler")


_WEIGHTS = "weights"
_Around = Callable[..., AbstractContextManager[None]]
_TOUCHES: dict[str, _Around] = {
    "sleep": DeltaSyncEngine.sleeping,
    "wake_up": DeltaSyncEngine.waking,
    "discard": DeltaSyncEngine.discarding,
    "reload_weights": DeltaSyncEngine.loading,
    "reset_weights": DeltaSyncEngine.loading,
    "update_weights_from_ipc": DeltaSyncEngine.loading,  # of checkpoint-engine's extension
}


def _wrap_touches(worker_class: type) -> None:
    """Wrap the worker's methods that touch weights: vLLM does not report their calls.

    Weights that sleep must not be read, and may have changed when they wake. The worker also gets
    the methods that are called in place of vLLM's.
    """
    setattr(worker_class, WRITE, write)
    setattr(worker_class, TRY, attempt)
    for name, around in _TOUCHES.items():
        method = getattr(worker_class, name, None)
        if method is not None and not hasattr(method, "is_wrapped"):
            setattr(worker_class, name, _wrapped(method, around))


def _wrapped(method: Callable[..., object], around: _Around) -> Callable[..., object]:
    @wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> object:
        engine = worker.weight_transfer_engine
        if not isinstance(engine, DeltaSyncEngine):
            return method(worker, *args, **kwargs)
        with around(engine, *args, **kwargs):
            return method(worker, *args, **kwargs)

    call.is_wrapped = True  # type: ignore[attr-defined]
    return call


class _Registered:
    """The parameters and buffers that a module and its submodules have now."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [
            (m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set))
            for m in module.modules()
        ]

    def put_back(self) -> None:
        """Restore them in the module."""
        for owner, parameters, buffers, transient in self._owners:
            for held, before in ((owner._parameters, parameters), (owner._buffers, buffers)):
                held.clear()
                held.update(before)  # type: ignore[arg-type]
            owner._non_persistent_buffers_set.clear()  # in place: others put the set itself back
            owner._non_persistent_buffers_set.update(transient)


class _Packing:
    """Weights packed for CPUs. vLLM's layerwise reload leaves some of them unpacked."""

    def __init__(self, model: nn.Module) -> None:
        modules: Iterable[Any] = model.modules() if current_platform.is_cpu() else ()
        self._packed = [m for m in modules if getattr(m, "quant_method", None) is not None]
        experts = [m.quant_method for m in self._packed if hasattr(m.quant_method, "moe_kernel")]
        self._kernels = [(method, method.moe_kernel) for method in experts]

    def forget(self) -> None:
        """Remove the experts' kernels: vLLM packs only experts that have none."""
        for method, _ in self._kernels:
            method.moe_kernel = None

    def remember(self) -> None:
        """Put the kernels back."""
        for method, kernel in self._kernels:
            method.moe_kernel = kernel

    def renew(self) -> None:
        """Pack heads that keep a packed copy: vLLM gives no weights to a tied one."""
        for module in self._packed:
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
