"""After any history of a whole sync's ends, who calls itself clean holds what it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync import DeltaSyncError, ReceiverOptions, SenderOptions, WeightReceiver
from deltasync.delta.bits import as_bits
from deltasync.delta.choice import Kernels
from deltasync.errors import DirtyReceiver, PeerLost, SourceChanged, TransportTimeout
from deltasync.integrations.streamed import StreamedWeights
from deltasync.store.copied import CopiedTarget
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import decode
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import (
    LINKS,
    FailsOnce,
    Fleet,
    Model,
    Stubborn,
    ThroughReceiver,
    Watched,
    until,
)
from tests.worlds.peers import said

__all__ = ["one_kernel_at_a_time"]  # pytest uses it

ENDS = ("whole", "half/0", "half/1")
SENT = ("layout", "welcome", "begin", "bucket", "prepare", "commit", "finish")
ANSWERED = ("held", "prepared", "committed")
DAMAGES = ("flip header", "flip payload", "drop", "lose")
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn)
SHARES = (0.0, 0.003, 0.05, 0.4, 1.0)


class Faulty(ThroughReceiver):
    """A receiver's link that does one thing wrong, with the next message of a kind."""

    plan: tuple[str, str] | None = None

    def receive(self, *, timeout_s: float) -> Frame:
        frame = super().receive(timeout_s=timeout_s)
        match self._due(frame.header):
            case "lose":
                self._leave()
            case "drop":
                return super().receive(timeout_s=timeout_s)
            case str() as fault:
                return damaged(frame, fault)
        return frame

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        match self._due(data):
            case "lose":
                self._leave()
            case "lie":
                data = said(decode(data)[0], digest="0123456789abcdef").header
        super().reply(data, timeout_s=timeout_s)

    def _due(self, header: bytes) -> str | None:
        fault, kind = self.plan or ("", "")
        if not fault or decode(header)[0].kind != kind:
            return None
        self.plan = None
        return fault

    def _leave(self) -> None:
        self.disconnect()
        raise PeerLost("planted")


def damaged(frame: Frame, fault: str) -> Frame:
    header, payload = frame.header, frame.payload
    match fault:
        case "flip header":
            middle = len(header) // 2
            header = header[:middle] + bytes([header[middle] ^ 4]) + header[middle + 1 :]
        case "flip payload" if payload is not None and len(payload):
            payload = payload.clone()
            payload[len(payload) * 2 // 3] ^= 16
    return Frame(header, payload)


def fresh(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    drawn = torch.randint(0, 256, (numel * size,), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numels = draw(st.lists(st.integers(0, 400), min_size=1, max_size=4))
    tensors = {
        f"p{n}": fresh(numel, draw(st.sampled_from(DTYPES)), generator)
        for n, numel in enumerate(numels)
    }
    strided = fresh(60, torch.bfloat16, generator).view(6, 10).t()
    return tensors | {"strided": strided, "scalar": fresh(1, torch.float32, generator).view(())}


sending: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    bucket_bytes=st.sampled_from([256, 1000, 1 << 20]),
    max_inflight_bytes=st.sampled_from([0, 100, None]),
    snapshot_device=st.sampled_from([None, "cpu"]),
    compression=st.sampled_from(["none", "zstd", "gap"]),
)
shares = st.sampled_from(SHARES)
ends = st.sampled_from(ENDS)
syncs = st.tuples(st.just("sync"), shares)
events = st.one_of(
    st.tuples(st.just("fault"), ends, st.sampled_from(DAMAGES), st.sampled_from(SENT)),
    st.tuples(st.just("fault"), ends, st.sampled_from(["lie", "lose"]), st.sampled_from(ANSWERED)),
    st.tuples(st.just("fail_to_send"), st.sampled_from(SENT)),
    st.tuples(
        st.sampled_from(
            ["fail_to_commit", "move", "corrupt", "invalidate", "restart", "leave", "doze", "wake"]
        ),
        ends,
    ),
    st.tuples(st.sampled_from(["move_source", "restart_trainer", "read_and_give_up"])),
)
Event = tuple[Any, ...]
Bits = Mapping[str, Tensor]
histories = st.lists(syncs | events | events, max_size=8)


@dataclass(frozen=True)
class Cell:
    """How a history is played.

    Attributes:
        percent: Of the usual number of examples.
    """

    percent: int
    link: str = "in process"
    max_staged_bytes: int | None = None
    kernels: Kernels = "torch"
    source: Literal["module", "streamed"] = "module"


class Copy(FailsOnce, CopiedTarget):
    """All that a trainer streams."""


class End:
    """One receiver, the weights that it keeps when it restarts, and its faults."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], *, is_copy: bool) -> None:
        self.engine, _, rank = name.partition("/")
        self.rank, self.world = int(rank or 0), 2 if rank else 1
        absent = {"half/0": "scalar", "half/1": "strided"}.get(name)
        self.module = Model({n: torch.zeros_like(t) for n, t in tensors.items() if n != absent})
        self.target: Any = Copy() if is_copy else Stubborn(self.module)
        self.is_corrupt = False
        self.was_dirty = False  # the receiver before this one, of which a new one cannot know
        self.link: Faulty
        self.receiver: WeightReceiver

    def start(self, fleet: Fleet, options: ReceiverOptions) -> None:
        def faulty(link: ReceiveTransport) -> ReceiveTransport:
            self.link = Faulty(link)
            return self.link

        place = {"engine": self.engine, "rank": self.rank, "world": self.world}
        if last := getattr(self, "receiver", None):
            self.was_dirty = last.is_dirty or (self.was_dirty and last.version is None)
        self.receiver = fleet.add(self.target, **place, options=options, wrap=faulty).receiver  # type: ignore[arg-type]

    def held(self) -> dict[str, Tensor]:
        copied: Mapping[str, Tensor] = getattr(self.target, "tensors", {})
        return dict(copied) or {name: p.data for name, p in self.module.named_parameters()}

    def is_right(self, versions: Mapping[int, Bits], earlier: Sequence[Bits]) -> bool:
        """Whether it holds the version that it names, or else any, or says that it is dirty."""
        version = self.receiver.version
        if self.receiver.is_dirty or self.is_corrupt or (self.was_dirty and version is None):
            return True
        expected = [versions[version]] if version is not None else [*versions.values(), *earlier]
        held = {name: as_bits(tensor) for name, tensor in self.held().items()}
        return any(all(torch.equal(held[n], bits[n]) for n in held) for bits in expected)


class World:
    """A trainer, an engine of one rank and one of two."""

    def __init__(self, cell: Cell, tensors: dict[str, Tensor], sending: dict[str, Any]) -> None:
        self.cell, self.generator = cell, torch.Generator().manual_seed(0)
        self.source = Model({name: tensor.clone() for name, tensor in tensors.items()})
        if cell.source == "streamed":  # it has a snapshot of its own
            sending = {k: v for k, v in sending.items() if k != "snapshot_device"}
        self.sending = SenderOptions(**sending, kernels=cell.kernels)
        self.receiving = ReceiverOptions(
            max_staged_bytes=cell.max_staged_bytes,
            scrub_every=1,
            stall_timeout_s=0.3,
            kernels=cell.kernels,
        )
        is_streamed = cell.source == "streamed"
        self.ends = {n: End(n, tensors, is_copy=is_streamed and n == "whole") for n in ENDS}
        self.absent: set[str] = set()
        self.versions: dict[int, Bits] = {}
        self.earlier: list[Bits] = [
            {name: as_bits(torch.zeros_like(one)) for name, one in tensors.items()}
        ]
        self._train()

    def _train(self) -> None:
        """Start a trainer, to which everyone connects that is there."""
        self.earlier += self.versions.values()
        self.versions = {}
        self.stream = StreamedWeights(self.sending)
        is_streamed = self.cell.source == "streamed"
        self.fleet = Fleet(
            self.stream if is_streamed else self.source,
            options=None if is_streamed else self.sending,
            link=LINKS[self.cell.link],
            wrap=Watched,
        )
        for name in self.ends.keys() - self.absent:
            self.ends[name].start(self.fleet, self.receiving)

    def close(self) -> None:
        self.fleet.close()

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """In one order or the other, through memory that is used again."""
        named = list(self.source.named_parameters())
        for name, parameter in named[:: 1 - 2 * (self.fleet.sender.version % 2)]:
            gathered = parameter.data.clone()
            yield name, gathered
            as_bits(gathered).fill_(7)

    def send(self, *, timeout_s: float) -> Any:
        """Sync; what is sent is the version after the sender's, if it is decided.

        If that loses everybody, those that wait start from the same bits, as the next version.
        """
        bits = {n: as_bits(p.data).clone() for n, p in self.source.named_parameters()}
        if self.cell.source == "streamed":
            self.stream.take(self.exported())
        version = self.fleet.sender.version
        self.versions |= {version + 1: bits, version + 2: bits}
        return self.fleet.sender.send_weights(timeout_s=timeout_s)

    def check(self) -> None:
        for end in (self.ends[name] for name in self.ends.keys() - self.absent):
            until(lambda end=end: end.is_right(self.versions, self.earlier))  # type: ignore[misc]

    # What may happen.

    def sync(self, share: float) -> None:
        self.mutate(share)
        with suppress(DeltaSyncError):
            self.fleet.sender.wait_for_receivers(3 - len(self.absent), timeout_s=0.3)
        with suppress(DeltaSyncError):
            self.send(timeout_s=1)

    def fault(self, name: str, fault: str, kind: str) -> None:
        self.ends[name].link.plan = (fault, kind)

    def fail_to_send(self, kind: str) -> None:
        def fail() -> None:
            raise TransportTimeout("planted")

        self.fleet.link.once(kind, fail)

    def fail_to_commit(self, name: str) -> None:
        self.ends[name].target.fails = True

    def move(self, name: str) -> None:
        parameter = self.ends[name].module.get_parameter("p0")
        parameter.data = parameter.data.clone()

    def corrupt(self, name: str) -> None:
        end = self.ends[name]
        end.is_corrupt = True
        flat = max(end.held().values(), key=lambda tensor: tensor.is_contiguous() * tensor.numel())
        if numel := flat.numel():
            where = int(torch.randint(0, numel, (1,), generator=self.generator))
            as_bits(flat).view(-1)[where] ^= 1

    def invalidate(self, name: str) -> None:
        self.ends[name].receiver.invalidate()

    def leave(self, name: str) -> None:
        if name not in self.absent:
            self.absent.add(name)
            self.fleet.serving.pop(self._key(name)).stop()

    def restart(self, name: str) -> None:
        self.leave(name)
        self.absent.discard(name)
        self.ends[name].start(self.fleet, self.receiving)

    def doze(self, name: str) -> None:
        self.ends[name].receiver.detach()

    def wake(self, name: str) -> None:
        self.ends[name].receiver.attach()

    def move_source(self) -> None:
        for parameter in self.source.parameters():
            parameter.data = parameter.data.clone()

    def restart_trainer(self) -> None:
        self.fleet.close()
        self._train()

    def read_and_give_up(self) -> None:
        """A stream that breaks off in the middle."""
        if self.cell.source == "streamed" and self.versions:
            with pytest.raises(SourceChanged, match="did not come"):
                self.stream.take(islice(self.exported(), 1))

    # How it ends.

    def settle(self) -> None:
        """Stop all faults, and sync until everybody has joined and scrubbed all its weights."""
        self.fleet.link.before = lambda kind: None
        for name, end in self.ends.items():
            end.link.plan, end.target.fails = None, False
            self.wake(name)
            if name in self.absent:
                self.restart(name)
        self.mutate(0.1)
        clean = 0
        for _ in range(40):
            try:
                self.fleet.wait(3)
                stats = self.send(timeout_s=5)
            except DeltaSyncError:
                clean = 0
                continue
            good = not stats.lost and not stats.joined and stats.receivers == 3
            clean = clean + 1 if good else 0
            if clean == 2:  # between the two every receiver has scrubbed all its weights
                break
        assert clean == 2, "it does not settle"
        self.mutate(0.05)
        stats = self.send(timeout_s=60)  # nothing is in its way
        assert (stats.kind, stats.receivers, stats.lost) == ("delta", 3, {})
        for end in self.ends.values():
            end.is_corrupt = False
            until(lambda end=end: end.receiver.version == self.fleet.sender.version)  # type: ignore[misc]
            end.receiver.check_serving()
        self.check()

    def mutate(self, share: float) -> None:
        """Change about `share` of the bit patterns of every parameter, in place."""
        for parameter in self.source.parameters():
            new = fresh(parameter.numel(), parameter.dtype, self.generator).view(parameter.shape)
            bits = as_bits(parameter.data)
            chosen = torch.rand(bits.shape, generator=self.generator) < share
            bits[chosen] = as_bits(new)[chosen]

    def _key(self, name: str) -> str:
        return f"{self.ends[name].engine}/{self.ends[name].rank}"


def play(world: World, history: list[Event]) -> None:
    """Let it happen, and settle."""
    done: list[Event] = []
    try:
        for what, *about in history:
            done.append((what, *about))
            act: Callable[..., None] = getattr(world, what)
            act(*about)
            world.check()
        world.settle()
    except BaseException as error:
        error.add_note(f"after {done}")
        raise


CELLS = {
    "staged": Cell(40),
    "in place": Cell(40, max_staged_bytes=0),
    "by size": Cell(10, max_staged_bytes=3000),
    "streamed": Cell(30, source="streamed"),
    "shared memory": Cell(10, "shared memory", max_staged_bytes=3000),
    "gloo": Cell(4, "gloo"),
}
KERNELS = {"kernels": Cell(0, kernels="triton")}
CORNERS: dict[str, list[Event]] = {
    "weights are corrupt": [("corrupt", "whole"), ("sync", 0.003), ("sync", 0.05)],
    "half of a dirty engine cannot commit": [
        ("fail_to_send", "prepare"),
        ("sync", 0.4),
        ("fail_to_commit", "half/1"),
        ("sync", 0.05),
    ],
    "weights move": [("move", "half/0"), ("move_source",), ("sync", 0.05), ("sync", 0.05)],
    "an engine leaves and another sleeps": [
        ("leave", "half/0"),
        ("doze", "whole"),
        ("sync", 0.4),
        ("wake", "whole"),
        ("sync", 0.05),
    ],
    "a stream breaks off": [("sync", 0.4), ("read_and_give_up",), ("sync", 0.05)],
    **{f"the trainer fails at {k}": [("fail_to_send", k), ("sync", 0.4)] for k in SENT[2:]},
    **{f"a rank is lost at {k}": [("fault", "half/0", "lose", k), ("sync", 0.4)] for k in SENT[2:]},
}
FIXED = {
    "p0": torch.arange(300, dtype=torch.float32).bfloat16(),
    "strided": torch.ones(6, 10).bfloat16().t(),
    "scalar": torch.tensor(1.0),
}


@pytest.mark.promise(
    "All or nothing",
    "A sync larger than `max_staged_bytes` is written in place. If it breaks off, a receiver "
    "that has written something is dirty, refuses to serve, and is repaired by a full sync.",
)
@pytest.mark.promise("Errors", "`DirtyReceiver`: refuses to serve until a full sync.")
def test_breaking_off_in_place_is_dirty_refuses_to_serve_and_heals() -> None:
    with closing(World(CELLS["in place"], FIXED, {"bucket_bytes": 256})) as world:
        world.sync(0.4)
        world.fail_to_send("prepare")
        world.sync(0.4)
        for end in world.ends.values():
            until(lambda end=end: end.receiver.is_dirty)  # type: ignore[misc]
            with pytest.raises(DirtyReceiver):
                end.receiver.check_serving()
        world.mutate(0.1)
        world.fleet.wait(3)
        assert world.send(timeout_s=60).full_synced == 3  # all have left, and rejoin
        world.settle()


@pytest.mark.parametrize("name", ["staged", "in place", "streamed", *KERNELS])
def test_after_each_event_whoever_is_clean_holds_the_version_it_names(name: str) -> None:
    cell = (CELLS | KERNELS)[name]
    if name in KERNELS and torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    corners = list(CORNERS.items())[: 1 if name in KERNELS else None]
    with closing(World(cell, FIXED, {"bucket_bytes": 256})) as world:
        for _, history in corners:
            play(world, history)


@pytest.mark.promise(
    "Bits",
    "After any history of steps, failures and joins, receivers hold the trainer's bits.",
)
@pytest.mark.promise("Cost", "The snapshot may live on the host.")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS.keys())
def test_after_any_history_whoever_is_clean_holds_the_version_it_names(cell: Cell) -> None:
    @settings(
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=max(1, settings().max_examples * cell.percent // 100),
        # An example may wait for timeouts: shrinking would take hours.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
    @given(histories, models(), sending)
    def played(history: list[Event], tensors: dict[str, Tensor], sends: Any) -> None:
        with closing(World(cell, tensors, sends)) as world:
            play(world, [("sync", 0.4), *history])

    played()
