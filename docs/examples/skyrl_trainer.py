"""SkyRL: the engine by which its trainers send weights. See docs/integrations/trainers.md.

Not a program: SkyRL's weight_sync calls `register` and `sender_init_info`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from deltasync.integrations.vllm_trainer import DeltaSyncTrainer, DeltaSyncTrainerInitInfo

BACKEND = "skyrl_deltasync"


@dataclass
class SkyrlInitInfo(DeltaSyncTrainerInitInfo):
    """Under a name of its own, since deltasync's names the plain trainer."""

    backend: ClassVar[str] = BACKEND


class SkyrlTrainer(DeltaSyncTrainer):
    """With what SkyRL's Worker reads of its engines, and a client that pauses as SkyRL's can."""

    init_info_cls = SkyrlInitInfo
    skyrl_handles_prefix_cache_reset = True  # each update does
    skyrl_force_disable_expandable_segments = False
    skyrl_empty_cache_after_send = True

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return super().trainer_init(init_info, client=Pausing(client), source=source)


class Pausing:
    """A SkyrlWeightSyncClient under the names that deltasync calls."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._client.pause_generation(clear_cache=False)
        try:
            yield
        finally:
            self._client.resume_generation()

    def clear_cache(self) -> None:
        self._client.reset_prefix_cache(reset_running_requests=True)


def register() -> None:
    """In the place of `register_trainer_engines` of SkyRL's weight_sync/register.py."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, SkyrlTrainer)


def sender_init_info(host: str, rank: int, inference_world_size: int, link: Any) -> SkyrlInitInfo:
    """What `_build_sender_init_info` of SkyRL's weight_senders.py returns for this backend."""
    return SkyrlInitInfo(link, host=host, settings={"workers": inference_world_size}, rank=rank)
