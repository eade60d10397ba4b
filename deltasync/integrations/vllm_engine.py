"""The weight transfer backend that runs inside vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from deltasync import dtypes
from deltasync.delta.bits import torch_dtype
from deltasync.delta.recorder import CheckpointTensor
from deltasync.errors import ConfigError, IllegalMessage, TransportTimeout
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.routed import RoutedTarget
from deltasync.sync.staging_thread import StagingThread
from deltasync.transports import collective, cuda_ipc, shared_memory
from deltasync.transports.base import ReceiveTransport


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the trainer says when it connects: plain JSON.

    Attributes:
        link: "nccl", "gloo", "cuda_ipc" or "shared_memory".
        address: Host and port, or the path of a socket.
        names, dtypes, shapes: Of the checkpoint's tensors.
        max_staged_bytes: Memory for a version that is not written yet.
        timeout_s: For each wait.
    """

    link: str
    address: list[Any]
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    max_staged_bytes: int
    timeout_s: float


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
        self._open = ExitStack()
        self._staging: StagingThread | None = None
        self._timeout_s = 0.0
        self._is_proved = False  # that weights are kept where they are loaded

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer. A connection to another one is ended.

        Raises ConfigError for tensors that have no route, or are not where it leads, by name.
        """
        self.shutdown()
        shapes = zip(init_info.names, init_info.shapes, init_info.dtypes, strict=True)
        checkpoint = [
            CheckpointTensor(name, tuple(shape), torch_dtype(dtypes.BY_NAME[dtype]))
            for name, shape, dtype in shapes
        ]
        parallel = self.parallel_config
        target = RoutedTarget(self.model, checkpoint)
        if self._is_proved:
            target.parameters()  # so that the trainer hears at once what has no route
        else:
            target.prove(self._started_on())
            self._is_proved = True
        receiver = WeightReceiver(
            target,
            _receiver(init_info, self.device),
            engine=f"vllm-{parallel.data_parallel_index}",
            rank=parallel.rank,
            world=parallel.world_size,
            options=ReceiverOptions(max_staged_bytes=init_info.max_staged_bytes),
        )
        self._staging = self._open.enter_context(StagingThread(receiver))
        self._open.callback(receiver.close)  # first, which wakes the thread
        self._timeout_s = init_info.timeout_s

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

    def start_weight_update(self) -> None:
        """Nothing is to be prepared."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write the version. Raises what a commit raises; the worker keeps the old version then,
        unless it was received in place: a full sync, or one that could not be staged.
        """
        if self._staging is None:
            raise ConfigError("no trainer is connected: call init_weight_transfer_engine first")
        if not self._staging.wait_staged(timeout_s=self._timeout_s):
            raise self._staging.last_error or TransportTimeout("no version was staged in time")
        version = self._staging.commit()
        if version != update_info.version:
            raise IllegalMessage(f"v{version} was written, v{update_info.version} was asked for")

    def finish_weight_update(self) -> None:
        """Everything is written already."""

    def shutdown(self) -> None:
        """End the connection. The weights stay as they are."""
        self._staging = None
        self._open.close()


def _receiver(info: InitInfo, device: torch.device) -> ReceiveTransport:
    match info.link:
        case "nccl":
            return collective.Receiver(*info.address, backend="nccl", device=device)
        case "gloo":
            return collective.Receiver(*info.address)
        case "cuda_ipc":
            return cuda_ipc.Receiver(*info.address, device=device)
        case "shared_memory":
            return shared_memory.Receiver(*info.address)
        case _:
            raise ConfigError(f"no link is called {info.link!r}")
