"""Measures each way over links of several speeds, in front of an S3 server of this machine.

A link is a proxy with a token bucket for each direction: all bytes of the real client go through
it, requests and retries included, as they would over a slow network. The trainer publishes and then
the engine fetches, one after the other; a follower of the store would add the interval of its
polls. Each round publishes a real version: the two of a pair take turns.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.codec.pairs import Pair, pairs
from benchmarks.codec.training import Weights
from benchmarks.processes import Told
from benchmarks.record import SPEED_UP, Result, compared
from benchmarks.store.ways import (
    Checkpoint,
    Deltas,
    PatchedFile,
    Way,
    load_into,
    module_of,
    state_of,
)
from deltasync.delta.bits import are_equal, as_bits
from deltasync.delta.coding import Coding
from deltasync.store.objects import StoreOptions
from deltasync.sync.options import SenderOptions

CODINGS: tuple[Coding, ...] = ("gap", "class")
_BUCKET = "bench"
KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: pairs by name, of a scale, and rounds by bits per second."""

    scale: str
    pairs: tuple[str, ...]
    rounds: dict[float, int]


PLANS = {
    "full": Plan("full", ("masters-3e-7-k1", "masters-1e-6-k1"), {1e8: 1, 1e9: 3, 1e10: 3}),
    "quick": Plan("quick", ("masters-1e-6-k1",), {1e8: 1, 1e9: 3, 1e10: 3}),
    "tiny": Plan("tiny", ("masters-1e-4-k1",), {1e9: 1}),
}


class WrongWeights(RuntimeError):
    """An engine does not hold what was published."""


class Link:
    """A store behind a slow link; both are processes of this machine.

    Args:
        stack: What ends both.

    Attributes:
        endpoint, store: Of the store through the link, and options that lead there.
    """

    def __init__(self, stack: ExitStack) -> None:
        port = started(stack, "benchmarks.store.server").answer()
        put = urllib.request.Request(f"http://127.0.0.1:{port}/{_BUCKET}", method="PUT")
        urllib.request.urlopen(put, timeout=30).close()
        self._process = started(stack, "benchmarks.store.link", str(port))
        self.endpoint = f"http://127.0.0.1:{self._process.answer()}"
        self.store = StoreOptions(config={"endpoint": self.endpoint, **KEYS}, timeout_s=600)

    def set(self, bits_per_s: float | None) -> tuple[int, int]:
        """A new rate; None for no limit. Returns bytes (up, down) since the last call."""
        up, down = self._process.ask(bits_per_s)
        return up, down


def measure(scale: str) -> Iterator[Result]:
    """Records of all pairs of a plan, one thread. Raises WrongWeights."""
    plan, before = PLANS[scale], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            link = Link(stack)
            for pair in pairs(plan.scale, plan.pairs):
                yield from measure_pair(pair, link, plan.rounds)
    finally:
        torch.set_num_threads(before)


def measure_pair(pair: Pair, link: Link, rounds: dict[float, int]) -> Iterator[Result]:
    """Records of all ways over all links."""
    trainer = module_of(pair.old)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = _ways(trainer, f"s3://{_BUCKET}/{pair.name}", link.store, folder)
        for way in ways:
            stack.enter_context(closing(way))
        turn = _Turn(trainer, (pair.old, pair.new))
        for way in ways:  # each end has a version
            way.publish()
            way.fetch()
        for bits_per_s, count in rounds.items():
            yield from _over(link, bits_per_s, ways, turn, pair, count)


def _over(
    link: Link, bits_per_s: float, ways: Sequence[Way], turn: _Turn, pair: Pair, rounds: int
) -> Iterator[Result]:
    """Records of all ways over one link; they take turns."""
    found = {way.name: _Samples() for way in ways}
    for _ in range(rounds):
        turn.next()
        for way in ways:
            link.set(bits_per_s)
            found[way.name].measure(way)
            went = link.set(None)
            found[way.name].up, found[way.name].down = went
            if not same_bits(way.engine, turn.weights):
                raise WrongWeights(f"{way.name}: the engine does not hold what was published")
    whole = found[Checkpoint.name]
    for name, samples in found.items():
        yield compared(
            case="store",
            way=name,
            model=pair.name,
            link=f"{bits_per_s / 1e9:g} Gbit/s",
            numel=sum(one.numel() for one in pair.old.values()),
            parameters=len(pair.old),
            density=turn.changed / sum(one.numel() for one in pair.old.values()),
            changed=turn.changed,
            samples=samples.together,
            baseline=Checkpoint.name,
            baseline_samples=whole.together,
            ratio_is=SPEED_UP,
            goal=None,
            bytes=samples.up,
            bound_bytes=sum(one.nbytes for one in pair.old.values()),
            parts={
                "publish_s": median(samples.publish),
                "fetch_s": median(samples.fetch),
                "down_bytes": samples.down,
            },
        )


class _Samples:
    """Of one way over one link."""

    def __init__(self) -> None:
        self.publish, self.fetch = list[float](), list[float]()
        self.up = self.down = 0

    @property
    def together(self) -> list[float]:
        """Seconds from the trainer's step to the committed engine, by round."""
        return [p + f for p, f in zip(self.publish, self.fetch, strict=True)]

    def measure(self, way: Way) -> None:
        began = time.perf_counter()
        way.publish()
        published = time.perf_counter()
        way.fetch()
        self.publish.append(published - began)
        self.fetch.append(time.perf_counter() - published)


class _Turn:
    """The trainer's step: from one version of a pair to the other, and back."""

    def __init__(self, trainer: nn.Module, versions: tuple[Weights, Weights]) -> None:
        self._trainer, (self.weights, self._other) = trainer, versions
        ends = zip(self.weights.values(), self._other.values(), strict=True)
        self.changed = sum(int((as_bits(a) != as_bits(b)).sum()) for a, b in ends)

    def next(self) -> None:
        self.weights, self._other = self._other, self.weights
        load_into(self._trainer, self.weights)


def same_bits(module: nn.Module, weights: Weights) -> bool:
    """Whether a module holds these weights, bit for bit."""
    return all(are_equal(as_bits(one), as_bits(weights[n])) for n, one in state_of(module).items())


def _ways(trainer: nn.Module, url: str, store: StoreOptions, folder: Path) -> list[Way]:
    ours = [
        Deltas(trainer, f"{url}/{coding}", store, SenderOptions(compression=coding))
        for coding in CODINGS
    ]
    patched = PatchedFile(trainer, f"{url}/patched", store, folder=folder)
    return [*ours, Checkpoint(trainer, f"{url}/whole", store), patched]


def started(stack: ExitStack, module: str, *words: str) -> Told:
    """A process that ends with `stack`."""
    told = Told(module, *words)
    stack.callback(told.bury)
    return told
