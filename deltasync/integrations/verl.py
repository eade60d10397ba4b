"""Checkpoint engines for verl, whose `custom_backend_module` this is.

Importing this registers two backends. For `deltasync`, verl gathers all weights tensor by tensor,
and rank 0 compares and sends them. `delta_sharded` replaces verl's own backend of that name, to
which verl passes its training engine: every rank compares and sends what it holds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

import ray
from omegaconf import OmegaConf
from torch import Tensor, nn
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys

from deltasync.errors import ConfigError
from deltasync.integrations import verl_manager
from deltasync.integrations.streamed import StreamedWeights
from deltasync.integrations.verl_ends import Metrics, Options, Rollout, SendingRank
from deltasync.integrations.verl_fleet import FleetTrainer, RolloutServer
from deltasync.sync.module import ModuleSource
from deltasync.sync.source.tensors import Index
from deltasync.transports.address import Address

Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]


class DeltaSyncEngine(CheckpointEngine):
    """The changed elements of weights that verl gathers. Rank 0 keeps a copy of them and sends.

    Args:
        bucket_size: Of verl's own engines; see `bucket_bytes` of `SenderOptions`.
        is_master: On trainers: whether this is rank 0. None on rollouts.
        engine_kwargs: See `Options`.
    """

    wire_format = "named_tensors"
    defaults: ClassVar[Mapping[str, object]] = {"snapshot_device": "cpu"}
    every_rank_sends: ClassVar[bool] = False

    def __init__(
        self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: Any
    ) -> None:
        self._options = _options(engine_kwargs, self.defaults)
        self._is_master = bool(is_master)
        self._topology: dict[str, Any] = {}
        self._source: StreamedWeights | ModuleSource | None = None
        self._sending: SendingRank | FleetTrainer | None = None
        self._servers: list[RolloutServer] = []
        self._rollout = Rollout(self._options) if is_master is None else None

    def prepare(self) -> dict[str, Any]:
        """Return the address that this rank sends from, or the name of this worker."""
        if self._rollout is not None:
            return {"engine": self._rollout.prepare()}
        if not (self._is_master or self.every_rank_sends):
            return {}
        if self._sending is None:
            is_hub = self._is_master and self.every_rank_sends
            self._sending = SendingRank(self._options, is_hub=is_hub)
        assert isinstance(self._sending, SendingRank)
        found = {"address": _json(self._sending.address), "members": [*self._sending.members]}
        return found | ({"hub": _json(self._sending.hub)} if self._sending.hub else {})

    def serve(self, servers: list[RolloutServer]) -> None:
        """On trainers, in place of `prepare`: `send_weights` sends to these servers' workers."""
        self._servers = servers
        if self._is_master and self._sending is None:
            self._sending = FleetTrainer(self._options)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Topology:
        """Return the engines' names for trainers, and the trainers' addresses for rollouts."""
        trainers, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        of_trainers = {
            "engines": [rollout["engine"] for rollout in rollouts],
            "hub": trainers[0].get("hub"),
            "world": actor_wg_world_size,
        }
        of_rollouts = {
            "addresses": [there["address"] for there in trainers if "address" in there],
            "members": trainers[0]["members"],
        }
        each = {name: [value] * actor_wg_world_size for name, value in of_trainers.items()}
        each["rank"] = list(range(actor_wg_world_size))
        return each, {name: [value] * rollout_world_size for name, value in of_rollouts.items()}

    def init_process_group(self, **topology: Any) -> None:
        """Store what `build_topology` returned for this process."""
        if self._rollout is not None:
            addresses = [Address(**address) for address in topology["addresses"]]
            self._rollout.connect(addresses, members=topology["members"])
        self._topology = topology

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Metrics | None:
        """Send these weights to the rollouts. Ranks other than 0 take part in gathering them.

        Raises what `WeightSender.send_weights` raises; the next call then covers this one.
        """
        if isinstance(self._sending, FleetTrainer):
            return self._sending.send(weights, self._servers)
        if self._sending is None:
            for _ in weights:
                pass
            return None
        return self._send(self._sending, self._source_of(weights))

    def _source_of(self, weights: Any) -> StreamedWeights | ModuleSource:
        if self._source is None:
            self._source = StreamedWeights(self._options.sender)
        assert isinstance(self._source, StreamedWeights)
        self._source.take(weights)
        return self._source

    def _send(self, sending: SendingRank, source: StreamedWeights | ModuleSource) -> Metrics | None:
        return sending.send(source, self._topology["engines"])

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Receive a sync; yields (name, whole tensor) of all weights.

        Raises what `WeightReceiver.receive_weights` raises, before anything is yielded.
        """
        if self._rollout is None:
            raise ConfigError("this is a trainer's checkpoint engine, it receives nothing")
        return self._rollout.weights()

    def finalize(self) -> None:
        """Do nothing: connections stay for the next sync."""

    def close(self) -> None:
        """Close every connection. verl never calls this; its processes just end."""
        for end in (self._sending, self._rollout):
            if end is not None:
                end.close()


class ShardedDeltaSyncEngine(DeltaSyncEngine):
    """The same for a trainer sharded by FSDP2: every rank compares and sends what it holds.

    `send_weights` raises ConfigError for an engine of verl whose shards cannot be sent.
    """

    defaults: ClassVar[Mapping[str, object]] = {
        "snapshot_device": "cpu",
        "wire_dtypes": {"*": "bfloat16"},  # what verl's own delta_sharded sends
    }
    every_rank_sends = True

    def __init__(
        self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: Any
    ) -> None:
        super().__init__(bucket_size, is_master, **engine_kwargs)
        if self._options.in_place:
            raise ConfigError(
                "in_place needs the backend `deltasync`: with `delta_sharded` verl starts vLLM "
                "with its own weight transfer backend"
            )

    def _source_of(self, weights: Any) -> StreamedWeights | ModuleSource:
        if self._source is None:
            self._source = shards_of(weights)
        return self._source

    def _send(self, sending: SendingRank, source: StreamedWeights | ModuleSource) -> Metrics | None:
        here = self._topology
        return sending.send(
            source, here["engines"], Address(**here["hub"]), here["rank"], here["world"]
        )


def shards_of(engine: Any) -> ModuleSource:
    """Return this rank's shards of a verl training engine, by the names that verl exports.

    Raises ConfigError unless the engine uses FSDP2, without adapters and quantisation.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    module, use = getattr(engine, "module", None), "use the backend `deltasync`"
    if type(engine).get_per_tensor_param is not FSDPEngine.get_per_tensor_param:
        raise ConfigError(f"shards of a {type(engine).__name__} cannot be sent: {use}")
    if not isinstance(module, nn.Module) or fsdp_version(module) != 2:
        raise ConfigError(f"only FSDP2 (strategy: fsdp2) holds shards of parameters: {use}")
    if hasattr(module, "peft_config") or engine._qat_enabled:
        raise ConfigError(f"verl merges adapters, and quantises, while it gathers: {use}")

    def rename(name: str) -> str:
        return str(next(iter(convert_weight_keys({name: None}, module))))

    is_split = engine.model_config.hf_config.model_type != "gpt_oss"
    return ModuleSource(module, rename=rename, name_map=by_expert if is_split else None)


def by_expert(name: str, shape: tuple[int, ...]) -> Mapping[str, Index] | None:
    """Return the tensors that verl's export makes of stacked experts, by name."""
    stem, _, kind = name.rpartition(".")
    if len(shape) != 3 or not stem.endswith(".mlp.experts"):
        return None
    if kind == "down_proj":
        return {f"{stem}.{expert}.down_proj.weight": (expert,) for expert in range(shape[0])}
    if kind != "gate_up_proj":
        return None
    half = -(-shape[1] // 2)
    parts = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
    return {
        f"{stem}.{expert}.{part}.weight": (expert, at)
        for expert in range(shape[0])
        for part, at in parts.items()
    }


def _options(engine_kwargs: Mapping[str, Any], defaults: Mapping[str, object]) -> Options:
    """Raises ConfigError."""
    given = OmegaConf.to_container(OmegaConf.create(dict(engine_kwargs)), resolve=True)
    assert isinstance(given, dict)
    sender = given.get("sender", {})
    given["sender"] = {**defaults, **sender} if isinstance(sender, dict) else sender
    given.setdefault("host", ray.util.get_node_ip_address().strip("[]"))
    try:
        return Options(**given)
    except ConfigError as error:
        raise ConfigError(f"engine_kwargs: {error}") from error


def _json(address: Address) -> dict[str, Any]:
    return address.model_dump(mode="json")


CheckpointEngineRegistry.register(verl_manager.BACKEND)(DeltaSyncEngine)
CheckpointEngineRegistry.register("delta_sharded")(ShardedDeltaSyncEngine)
verl_manager.register()
