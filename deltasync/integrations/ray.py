"""Trainer ranks and engines in Ray actors, which find each other and find each other again.

Ray places, starts and restarts the actors. Here is only what they have to know of each other: where
the trainer's ranks listen now. Weights do not go through Ray.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import torch

from deltasync.errors import ConfigError
from deltasync.integrations.follower import Follower
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.options import ReceiverOptions, SenderOptions
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.sender import WeightSender
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.target.base import WeightTarget
from deltasync.transports import collective

_HUB = "hub"  # where rank 0 listens to the other ranks
_ANSWER_S = 10.0


class Rendezvous:
    """Where the actors of one training run meet. Make it in the driver, and pass it to each actor.

    The trainer's ranks call `sender`, engines call `follow`, both in `__init__`. Ray repeats that
    when it restarts an actor, which then connects again. Engines may be added at any time. If the
    ranks of the trainer are started again, together, running engines connect to the new ones.

    It has an actor of its own, on the driver's node, that knows where ranks listen. That ends with
    the driver, or with the object there. Its secret keeps other runs, and strangers, out: see
    "Network exposure" in Operations.

    Attributes:
        ranks: Number of ranks of the trainer.
        backend: What moves payloads: "gloo" between CPUs, "nccl" between GPUs.
    """

    def __init__(self, *, ranks: int = 1, backend: Literal["gloo", "nccl"] = "gloo") -> None:
        """Start the actor; arguments as the attributes."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ranks, self.backend = ranks, backend
        self._secret = secrets.token_bytes(32)
        self._name = f"deltasync-{secrets.token_hex(8)}"
        here = ray.get_runtime_context().get_node_id()
        place = NodeAffinitySchedulingStrategy(here, soft=True)
        board = ray.remote(_Board).options(name=self._name, num_cpus=0, scheduling_strategy=place)
        self._board = board.remote()  # the first handle keeps the actor alive

    def __getstate__(self) -> dict[str, Any]:
        """As an argument of actors that Ray restarts: without a handle, which it may lose."""
        return {**self.__dict__, "_board": None}

    def sender(
        self,
        source: WeightSource,
        *,
        rank: int = 0,
        device: torch.device | str | None = None,
        options: SenderOptions | None = None,
    ) -> WeightSender | TrainerRank:
        """Return this rank's sender, which listens on the address of the actor's node.

        Args:
            source: What this rank holds of the parameters.
            rank: This rank of the trainer. All must be in `send_weights` for engines to connect.
            device: Where payloads live; by default the CPU or the current GPU.
            options: The same on all ranks.
        """
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"rank is {rank}; this trainer has ranks 0 to {self.ranks - 1}")
        link = self._listen(self.backend, device)
        sender: WeightSender | TrainerRank
        if rank > 0:
            hub = _Receiver(self, _HUB, "gloo", None)
            sender = TrainerRank(source, link, hub, rank=rank, world=self.ranks, options=options)
        elif self.ranks > 1:
            hubs = self._listen("gloo", None)
            group = TrainerGroup(hubs, self.ranks)
            sender = WeightSender(source, link, options=options, group=group)
            self._post(_HUB, hubs)
        else:
            sender = WeightSender(source, link, options=options)
        self._post(f"rank {rank}", link)
        return sender

    def follow(
        self,
        target: WeightTarget,
        *,
        engine: str | None = None,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str | None = None,
        options: ReceiverOptions | None = None,
        timeout_s: float | None = None,
    ) -> Follower:
        """Let a thread keep the target's weights up to date. Returns when they are the trainer's.

        Args:
            target: The engine's weights.
            engine: Its unique name; by default that of the actor, or its id.
            rank: As of `WeightReceiver`.
            world: Likewise.
            options: Likewise.
            device: Where payloads live; by default the CPU or the current GPU.
            timeout_s: For the first version to arrive; None for no limit. Ray does not restart an
                actor whose `__init__` raises.

        Raises LayoutMismatch or Refused if the models differ, and TransportTimeout.
        """
        links = [_Receiver(self, f"rank {r}", self.backend, device) for r in range(self.ranks)]
        receiver = WeightReceiver(
            target,
            links[0],
            lanes=links[1:],
            engine=engine or _name_of_actor(),
            rank=rank,
            world=world,
            options=options,
        )
        follower = Follower(receiver)
        try:
            follower.wait_joined(timeout_s=timeout_s)
        except BaseException:
            follower.close()
            raise
        return follower

    def find(self, name: str) -> tuple[str, int]:
        """Return where a rank, or rank 0's hub, listens. Raises OSError while that is not known."""
        import ray

        try:
            board = ray.get_actor(self._name)
            found = ray.get(board.find.remote(name), timeout=_ANSWER_S)
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: there is no actor
            raise OSError(f"the rendezvous does not answer: {error}") from error
        if found is None:
            raise OSError(f"the trainer is not up yet: {name}")
        host, port = found
        return str(host), int(port)

    def _listen(self, backend: str, device: torch.device | str | None) -> collective.Sender:
        import ray

        here = ray.util.get_node_ip_address()
        return collective.Sender(here, 0, backend=backend, device=device, secret=self._secret)

    def _post(self, name: str, link: collective.Sender) -> None:
        import ray

        ray.get(ray.get_actor(self._name).post.remote(name, link.address), timeout=_ANSWER_S)


class _Board:
    """An actor that knows where ranks listen, by name."""

    def __init__(self) -> None:
        self._addresses: dict[str, tuple[str, int]] = {}

    def post(self, name: str, address: tuple[str, int]) -> None:
        self._addresses[name] = address

    def find(self, name: str) -> tuple[str, int] | None:
        return self._addresses.get(name)


class _Receiver(collective.Receiver):
    """A connection to a rank of the trainer, wherever that listens now."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        backend: str,
        device: torch.device | str | None,
    ) -> None:
        super().__init__("", 0, backend=backend, device=device, secret=rendezvous._secret)
        self._rendezvous, self._name = rendezvous, name
        self._last: tuple[str, int] | None = None

    def sender_address(self) -> tuple[str, int]:
        """Where the sender listens, or did before the rendezvous was gone."""
        try:
            self._last = self._rendezvous.find(self._name)
        except OSError:
            if self._last is None:
                raise
        return self._last


def _name_of_actor() -> str:
    import ray

    context = ray.get_runtime_context()
    return context.get_actor_name() or f"actor-{context.get_actor_id() or 'none'}"
