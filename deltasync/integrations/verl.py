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
from deltasync.integrations.verl_ends import Metrics, Options, Rollout, SendingRank, Trainer
from deltasync.integrations.verl_fleet import FleetTrainer, RolloutServer
from deltasync.sync.module import ModuleSource
from deltasync.sync.source.streamed import NamedWeights
from deltasync.sync.source.tensors import Index
from deltasync.transports.address import Address

Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]


class DeltaSyncEngine(CheckpointEngine):
    """The changed elements of weights that verl gathers. Rank 0 keeps a copy of them and sends.

    Args:
        bucket_size: Largest payload in bytes; at most 64 MiB are used.
        is_master: On trainers: whether this is rank 0. None on rollouts.
        engine_kwargs: See `Options`.
    """

    wire_format = "named_tensors"
    defaults: ClassVar[Mapping[str, object]] = {"snapshot_device": "cpu"}

    def __init__(
        self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: Any
    ) -> None:
        self._options = _options(engine_kwargs, self.defaults)
        self._sizes = self._options.sized(bucket_size)
        self._is_master = is_master
        self._told: dict[str, Any] = {}
        self._trainer: Trainer | FleetTrainer | None = None
        self._servers: list[RolloutServer] = []
        self._rollout = Rollout(self._options) if is_master is None else None

    def prepare(self) -> dict[str, Any]:
        """Return the address that this rank sends from, or the name of this worker."""
        if self._rollout is not None:
            return {"engine": self._rollout.prepare()}
        if not self._is_master:
            return {}
        if isinstance(self._trainer, FleetTrainer):  # an engine has refused to write in place
            self._trainer.close()
            self._trainer = None
        if self._trainer is None:
            self._trainer = Trainer(self._options, self._sizes)
        assert isinstance(self._trainer, Trainer)
        return {"address": _json(self._trainer.address), "members": sorted(self._trainer.members)}

    def serve(self, servers: list[RolloutServer]) -> None:
        """On trainers, in place of `prepare`: `send_weights` sends to these servers' workers."""
        self._servers = servers
        if self._is_master and self._trainer is None:
            self._trainer = FleetTrainer(self._options, self._sizes)

    def refused(self) -> str:
        """On trainers: why a server cannot write in place; empty if none has refused."""
        return self._trainer.refused if isinstance(self._trainer, FleetTrainer) else ""

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Topology:
        """Return the engines' names for trainers, and the trainers' addresses for rollouts."""
        trainers, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        engines = [rollout["engine"] for rollout in rollouts]
        addresses = [there["address"] for there in trainers if "address" in there]
        hub = trainers[0].get("hub")
        told: dict[str, list[Any]] = {
            "engines": [engines] * actor_wg_world_size,
            "hub": [hub] * actor_wg_world_size,
            "rank": list(range(actor_wg_world_size)),
            "world": [actor_wg_world_size] * actor_wg_world_size,
        }
        members = trainers[0]["members"]
        return told, {
            "addresses": [addresses] * rollout_world_size,
            "members": [members] * rollout_world_size,
        }

    def init_process_group(self, **told: Any) -> None:
        """Store what `build_topology` returned for this process."""
        if self._rollout is not None:
            addresses = [Address(**address) for address in told["addresses"]]
            self._rollout.connect(addresses, members=told["members"])
        self._told = told

    async def send_weights(
        self, weights: NamedWeights, global_steps: int | None = None
    ) -> Metrics | None:
        """Send these weights to the rollouts. Ranks other than 0 take part in gathering them.

        Raises what `WeightSender.send_weights` raises; the next call then covers this one.
        """
        if isinstance(self._trainer, FleetTrainer):
            return self._trainer.send(weights, self._servers)
        if self._trainer is not None:
            return self._trainer.send(weights, self._told.get("engines", []))
        for _ in weights:
            pass
        return None

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Receive a sync; yields (name, whole tensor) of what the inference engine does not have.

        Raises what `WeightReceiver.receive_weights` raises, before anything is yielded.
        """
        return self._of_rollout().weights()

    def finalize(self) -> None:
        """The sync succeeded: rollouts record that the engine has what it was given."""
        if self._rollout is not None:
            self._rollout.confirm()

    def forget(self) -> None:
        """On rollouts: the inference engine lost its weights. The next sync gives all of them."""
        self._of_rollout().forget()

    def close(self) -> None:
        """Close every connection. verl never calls this; its processes just end."""
        for end in (self._trainer, self._rollout):
            if end is not None:
                end.close()

    def _of_rollout(self) -> Rollout:
        if self._rollout is None:
            raise ConfigError("this is a trainer's checkpoint engine, it receives nothing")
        return self._rollout


class ShardedDeltaSyncEngine(DeltaSyncEngine):
    """The same for a trainer sharded by FSDP2: every rank compares and sends what it holds."""

    defaults: ClassVar[Mapping[str, object]] = {
        "snapshot_device": "cpu",
        "wire_dtypes": {"*": "bfloat16"},  # what verl's own delta_sharded sends
    }

    def __init__(
        self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: Any
    ) -> None:
        super().__init__(bucket_size, is_master, **engine_kwargs)
        if self._options.hand_over == "in_place":
            raise ConfigError(
                "hand_over: in_place needs the backend `deltasync`: with `delta_sharded` verl "
                "starts vLLM with its own weight transfer backend"
            )
        self._rank: SendingRank | None = None
        self._source: ModuleSource | None = None

    def prepare(self) -> dict[str, Any]:
        """Return the address that this rank of the trainer sends from; see `DeltaSyncEngine`."""
        if self._rollout is not None:
            return super().prepare()
        if self._rank is None:
            is_master = bool(self._is_master)
            self._rank = SendingRank(self._options, self._sizes, is_master=is_master)
        told: dict[str, Any] = {"address": _json(self._rank.address)}
        if self._rank.hub is not None:
            told |= {"hub": _json(self._rank.hub), "members": sorted(self._rank.members)}
        return told

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Metrics | None:
        """Send the weights of verl's training engine to the rollouts.

        Raises ConfigError for an engine whose shards cannot be sent, and what
        `WeightSender.send_weights` raises.
        """
        if self._rank is None:
            raise ConfigError("call prepare first")
        if self._source is None:
            self._source = shards_of(weights)
        told = self._told
        hub = Address(**told["hub"])
        return self._rank.send(self._source, told["engines"], hub, told["rank"], told["world"])

    def close(self) -> None:
        """Close every connection."""
        super().close()
        if self._rank is not None:
            self._rank.close()


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
