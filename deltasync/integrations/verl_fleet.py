"""A verl trainer whose rollouts' engines receive the changes and write them. Needs no verl."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from deltasync.errors import ConfigError, EngineFailed, SyncAborted
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.verl_ends import Metrics, Options, metrics_of, seconds_to_take
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.sync.options import SenderOptions
from deltasync.sync.source.streamed import NamedWeights, StreamedWeights
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
        sizes: Of the sender.

    Attributes:
        refused: Why an engine cannot write in place, by its name; empty if none has said so.
    """

    def __init__(self, options: Options, sizes: SenderOptions) -> None:
        self.refused = ""
        self._timeout_s = options.timeout_s
        self._weights = StreamedWeights(sizes)
        transport, self.address = options.listen()
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
        taken_s = seconds_to_take(weights, self._weights)
        self._follow(servers)
        try:
            stats = self._fleet.send_weights(timeout_s=self._timeout_s)
        except SyncAborted as error:
            self.refused = self._refusal(error)
            raise
        if stats.lost:
            raise SyncAborted(
                f"not every rollout holds v{stats.version} ({reasons(stats.lost)}); the next sync "
                "covers the others"
            )
        return metrics_of(stats, taken_s)

    def close(self) -> None:
        """Let the engines disconnect. They keep their weights."""
        try:
            self._fleet.disconnect()
        finally:
            self._fleet.close()

    def _refusal(self, error: SyncAborted) -> str:
        """Why an engine that has never taken part cannot; empty if that is not what went wrong."""
        is_told = isinstance(error.__cause__, ConfigError | EngineFailed)
        states = self._fleet.servers().values()
        return str(error) if is_told and any(s.version is None and s.why for s in states) else ""

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
