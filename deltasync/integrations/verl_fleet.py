"""A verl trainer whose rollouts' engines receive the changes and write them. Needs no verl."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from deltasync.errors import SyncAborted
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.streamed import NamedWeights, StreamedWeights
from deltasync.integrations.verl_ends import Metrics, Options, metrics_of
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.sync.stats import reasons


class RolloutServer(NamedTuple):
    """The vLLM server of a rollout.

    Attributes:
        name: In logs; another one after a restart at another address.
        url: Its scheme, host and port.
        workers: Number of its processes that hold weights.
    """

    name: str
    url: str
    workers: int


class FleetTrainer:
    """The rank of a trainer to which verl passes all weights, and which engines receive from.

    A version needs every server that `send` is given: if one cannot take it, none of them does.
    The engines serve until they are asked to write, and each pauses for that alone.

    Args:
        options: Of both ends.
    """

    def __init__(self, options: Options) -> None:
        self._timeout_s = options.timeout_s
        self._weights = StreamedWeights(options.sender)
        transport, _ = options.listen()
        self._fleet = EngineFleet(
            self._weights,
            transport,
            min_engines=None,
            max_staged_bytes=options.max_staged_bytes,
            timeout_s=options.timeout_s,
        )

    def send(self, weights: NamedWeights, servers: Collection[RolloutServer]) -> Metrics:
        """Sync these servers. Those of the last call that are not among them are left as they are.

        Raises SyncAborted if a server does not hold the version; the next call covers it.
        """
        self._weights.take(weights)
        self._follow(servers)
        stats = self._fleet.send_weights(timeout_s=self._timeout_s)
        if stats.lost:
            raise SyncAborted(
                f"not every rollout holds v{stats.version} ({reasons(stats.lost)}); the next sync "
                "covers the others"
            )
        return metrics_of(stats)

    def close(self) -> None:
        """Close every connection. The engines keep their weights."""
        self._fleet.close()

    def _follow(self, servers: Collection[RolloutServer]) -> None:
        """Add the servers that are new, and remove those that are gone."""
        known, wanted = self._fleet.servers(), {server.name: server for server in servers}
        for name in known.keys() - wanted.keys():
            self._fleet.remove(name)
        for name in wanted.keys() - known.keys():
            client = HttpClient(wanted[name].url, timeout_s=self._timeout_s)
            self._fleet.add(
                VllmServer(client), workers=wanted[name].workers, paused=client.paused, name=name
            )
