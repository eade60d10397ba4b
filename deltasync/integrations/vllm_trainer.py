"""The trainer's half of vLLM's weight transfer interface, for loops that drive that interface.

Importing this registers it: `WeightTransferTrainerFactory.trainer_init` then makes a
`DeltaSyncTrainer` of a `DeltaSyncTrainerInitInfo`. It imports vLLM; trainers that do not want that
use an `EngineSync`. Where vLLM is missing or too old, importing this raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import get_annotations
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from deltasync.config import network_secret
from deltasync.delta.bits import dtype_of
from deltasync.delta.modes import plain_mode
from deltasync.errors import ConfigError, TransportClosed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.streamed import StreamedWeights
from deltasync.integrations.trainer_info import Caches
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.integrations.vllm_core import BACKEND
from deltasync.sync.protocol.links import OneCaller
from deltasync.sync.stats import SyncStats
from deltasync.transports.address import LinkName, listen
from deltasync.wire.messages import ParameterSpec, check_limits

try:
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    if "backend" not in get_annotations(TrainerInitInfo):
        raise ImportError("it wants a configuration, too")
except ImportError as error:
    raise ConfigError(
        f"there is no vLLM here whose trainer's half is known ({error}): use vLLM 0.32 or newer, "
        "or an EngineSync, which does not import vLLM"
    ) from error


@dataclass
class DeltaSyncTrainerInitInfo(TrainerInitInfo):
    """What `WeightTransferTrainerFactory.trainer_init` makes a `DeltaSyncTrainer` of.

    Attributes:
        link: What moves weights: "shared_memory" to workers on CPUs of this host, "cuda_ipc" to
            workers on its GPUs, "nccl" or "gloo" to others.
        host: The address of this trainer, as workers reach it, for "nccl" and "gloo". Both ends
            take the secret of that link from DELTASYNC_SECRET.
        caches: See `VllmServer`.
        settings: Other arguments of `EngineSync`, except for `group`. By default `workers` is what
            the client's `workers()` returns, and `paused` the client's, where it has them.
        rank: Of this process in the trainer. Rank 0 sends.
    """

    backend: ClassVar[str] = BACKEND

    link: LinkName
    host: str = "127.0.0.1"
    caches: Caches = "clear"
    settings: Mapping[str, Any] = field(default_factory=dict)


class DeltaSyncTrainer(TrainerWeightTransferEngine):
    """Sends a trainer's weights as an `EngineSync` does, where vLLM's interface is driven.

    Attributes:
        last_stats: Of the last `send_weights` that succeeded; None before, and on other ranks than
            0.
    """

    init_info_cls = DeltaSyncTrainerInitInfo

    def __init__(self, init_info: DeltaSyncTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self.last_stats: SyncStats | None = None
        self._caller = OneCaller("a sync is under way; a DeltaSyncTrainer is used by one thread")
        self._on_rank_0: tuple[StreamedWeights, EngineSync] | None = None

    @classmethod
    def trainer_init(
        cls, init_info: DeltaSyncTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Let the engine's workers connect. Called on all ranks of the trainer.

        Args:
            init_info: The settings.
            client: One of vLLM's clients, or of those in `deltasync.integrations.vllm`. In the
                place of vLLM's client for HTTP an `HttpClient` is used, which can pause.
            source: vLLM's `WeightSource`, which may gather tensors of which ranks hold parts: all
                ranks go through it once in each `send_weights`, and rank 0 has to get all
                tensors, whole.

        Raises:
            ConfigError: The arguments do not fit, or a worker cannot take part.
            DirtyReceiver, EngineFailed, TransportTimeout: See `EngineSync.connect`.
        """
        engine = cls(init_info, client=client, source=source)
        layout = _layout_of(source)
        if engine.is_sender:
            engine._begin(init_info, layout)
        return engine

    def _begin(self, init_info: DeltaSyncTrainerInitInfo, layout: Sequence[ParameterSpec]) -> None:
        """Raises as `trainer_init`."""
        client, settings = self.client, dict(init_info.settings)
        if type(client) is HTTPVLLMWeightSyncClient:
            client = HttpClient(client.base_url, timeout_s=client.timeout)
        if "workers" not in settings:
            if not callable(getattr(client, "workers", None)):
                raise ConfigError(
                    f"{type(client).__name__} cannot tell how many workers hold weights: give "
                    'settings={"workers": tensor times pipeline times data parallel}'
                )
            settings["workers"] = client.workers()
        settings.setdefault("paused", getattr(client, "paused", nullcontext))
        server = VllmServer(client, caches=init_info.caches)
        weights = StreamedWeights(settings.pop("options", None), announced=layout)
        transport, _ = listen(init_info.link, host=init_info.host, secret=network_secret())
        try:
            sync = EngineSync(weights, server, transport, **settings)
            self._on_rank_0 = weights, sync
            sync.connect()
        except BaseException:
            self.shutdown()
            transport.close()
            raise

    def send_weights(self) -> None:
        """Send the weights as they are now, as one version. Called on all ranks of the trainer.

        When it returns on rank 0, all workers hold the version, and it is the server's weight
        version. If it raises, the next call covers both; other ranks do not learn of that.

        Raises what `StreamedWeights.take` and `EngineSync.send_weights` raise.
        """
        with plain_mode(), self._caller.call():
            if self._on_rank_0 is not None:
                weights, sync = self._on_rank_0
                weights.take(_stream(self.source))
                self.last_stats = sync.send_weights()
                return
            if self.is_sender:
                raise TransportClosed("this trainer was shut down: make another by trainer_init")
            for _ in _stream(self.source):  # takes part in gathering
                pass
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # a gather reads what the next step may write

    def shutdown(self) -> None:
        """Close every connection: see `EngineSync.close`. The engine keeps its weights."""
        if self._on_rank_0 is not None:
            (_, sync), self._on_rank_0 = self._on_rank_0, None
            sync.close()


def _layout_of(source: Any) -> tuple[ParameterSpec, ...]:
    """What a source of vLLM's brings to rank 0. Raises ConfigError if that cannot be sent."""
    if not hasattr(type(source), "metadata"):
        raise ConfigError(f"{type(source).__name__} is no WeightSource of vLLM's: give one")
    declared = source.metadata  # a method up to vLLM 0.32; it may have to gather
    metas = declared() if callable(declared) else declared
    if not getattr(source, "implements_iter_full", lambda: True)():
        raise ConfigError(f"{type(source).__name__} has no iter_full, so no tensors that are whole")
    for meta in metas:
        owners = getattr(meta, "owners", None)
        if owners is not None and 0 not in owners:
            raise ConfigError(
                f"{meta.name!r} does not come to rank 0 of the trainer, but to {list(owners)}: let "
                "the source gather it"
            )
    specs = tuple(
        ParameterSpec(
            (meta.name,),
            tuple(meta.shape),
            dtype_of(torch.empty(0, dtype=meta.dtype), name=meta.name),
        )
        for meta in metas
    )
    check_limits(specs)
    return specs


def _stream(source: Any) -> Iterator[tuple[str, Tensor]]:
    """Go through a source of vLLM's: by its `iter_full`, which it has from vLLM 0.33 on."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, DeltaSyncTrainer)
