"""slime: SGLang follows its actors by deltas. docs/integrations/trainers.md.

python train.py ... --custom-megatron-init-path slime_updater.use  # with this folder in PYTHONPATH
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deltasync.config import network_secret
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.sglang import SglangServer
from deltasync.integrations.streamed import StreamedWeights
from deltasync.transports import collective


class DeltaSyncUpdater:
    """In the place of slime's UpdateWeightFromDistributed. Each rank of the trainer has one."""

    server_of: Any = SglangServer

    def __init__(self, args: Any, model: Any, weights_getter: Any, **how: Any) -> None:
        from slime.backends.megatron_utils.update_weight import hf_weight_iterator_base

        create = hf_weight_iterator_base.HfWeightIteratorBase.create
        self._iterator, self._weights_getter = create(args, model, **how), weights_getter
        self._weights, self._addresses, self.weight_version = StreamedWeights(), set[str](), 0
        self._fleet: EngineFleet | None = None

    def connect_rollout_engines(self, engines: Sequence[Any], *_: Any, **__: Any) -> None:
        """Called when there are new engines; the next update connects those."""
        if dist.get_rank() == 0:
            self._addresses = {self.address_of(engine) for engine in engines}

    def update_weights(self) -> None:
        """Ranks gather each tensor together; rank 0 compares it and sends what has changed."""
        if dist.get_rank() == 0:
            self._weights.take(self._gathered())
            self.weight_version = self._joined().send_weights().version
        else:
            deque(self._gathered(), maxlen=0)
            self.weight_version += 1

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self._iterator.get_hf_weight_chunks(self._weights_getter()):
            yield from chunk

    def _joined(self) -> EngineFleet:
        fleet = self._fleet or EngineFleet(self._weights, self.transport(), timeout_s=600)
        self._fleet, known = fleet, fleet.servers().keys()
        for address in known - self._addresses:
            fleet.remove(address)
        for address in self._addresses - known:
            server = self.server_of(address)
            fleet.add(server, workers=server.workers, paused=server.paused, name=address)
        return fleet

    @staticmethod
    def address_of(engine: Any) -> str:
        import ray

        host, port = ray.get([engine.get_server_host.remote(), engine.get_server_port.remote()])
        return f"http://{host}:{port}"

    @staticmethod
    def transport() -> Any:
        from ray.util import get_node_ip_address as here

        return collective.Sender(here(), backend="nccl", device="cuda", secret=network_secret())


def use(args: Any) -> None:
    """Called in each actor before it makes its updater."""
    from slime.backends.megatron_utils import actor

    actor.UpdateWeightFromDistributed = DeltaSyncUpdater
