"""`python -m benchmarks.verl_pause`: how long a rollout of verl stands still in an update.

verl's manager, an FSDP2 trainer of one rank and a vLLM server that verl has started, on a CPU, over
gloo. Requests for one token follow one another; the pause of an update is the longest time in
which none ended, less the time that one takes otherwise. In place, vLLM's workers receive the
changes and write them; the baseline is `hand_over: changed`, on the same server. Environment:
`.venv-verl`, see the Makefile.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
_SIZES = {
    "full": {"hidden": 1024, "inter": 2816, "layers": 9},
    "tiny": {"hidden": 128, "inter": 192, "layers": 2},
}
_ROUNDS = 5
_EVERY = 100  # of so many elements one changes


@dataclass(frozen=True, slots=True)
class Pause:
    """One update.

    Attributes:
        way: How the engine got the weights.
        longest_s: The longest time in which no request ended.
        usual_s: Median time of a request while there is no update.
        update_s: The whole call of verl's manager.
        commit_s: The part of it from the decision on, as the trainer sees it.
    """

    way: str
    longest_s: float
    usual_s: float
    update_s: float
    commit_s: float

    @property
    def pause_s(self) -> float:
        return max(self.longest_s - self.usual_s, 0.0)


class Requests:
    """Requests for one token, one after the other, until the `with` block ends."""

    def __init__(self, replica: Any) -> None:
        self._server, self._ends = replica.servers[0], [time.perf_counter()]
        self._is_over = False

    @contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._go_on)
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            thread.join()

    def longest(self, since: float, until: float) -> float:
        """The longest time between two ends, of those that reach into this time."""
        pairs = pairwise(self._ends)
        return max(after - before for before, after in pairs if after > since and before < until)

    def usual(self, until: float) -> float:
        """The median time between two ends before this time, of the last few."""
        ends = [end for end in self._ends if end <= until][-20:]
        return median(after - before for before, after in pairwise(ends))

    def _go_on(self) -> None:
        import ray

        sampling = {"max_tokens": 1, "temperature": 0.0}
        while not self._is_over:
            name = f"request-{len(self._ends)}-{time.monotonic_ns()}"
            answer = ray.get(self._server.generate.remote([5, 6, 7], dict(sampling), name))
            if answer.token_ids:
                self._ends.append(time.perf_counter())


def measure(size: Mapping[str, int], rounds: int) -> Iterator[Pause]:
    """All updates, in place and then handed over."""
    from tests.verl import rollouts

    with tempfile.TemporaryDirectory() as name, rollouts.cluster(1):
        from verl.checkpoint_engine import CheckpointEngineManager

        folder = Path(name)
        rollouts.save_model(folder, **size)
        config = rollouts.configured()
        replica = rollouts.replica_of(0, folder, config)
        rollouts.start(replica)
        trainers = rollouts.trainer_of(folder, config)
        manager = CheckpointEngineManager(config, trainers, [replica])
        requests = Requests(replica)
        with requests.going_on():
            for way in ("in place", "handed over"):
                manager.hands_over = way == "handed over"
                manager.update_weights(0)  # connects; engines of the baseline get everything
                for _ in range(rounds):
                    trainers.step(_EVERY)
                    time.sleep(3)
                    began = time.perf_counter()
                    metrics = manager.update_weights(0)
                    ended = time.perf_counter()
                    time.sleep(1)
                    yield Pause(
                        way,
                        requests.longest(began, ended),
                        requests.usual(began),
                        ended - began,
                        metrics["checkpoint_engine/commit_s"],
                    )


def main(scale: str = "full") -> None:
    """Print each update, and the medians."""
    sys.modules["tests"] = ModuleType("tests")  # verl installs a package of that name, too
    sys.modules["tests"].__path__ = [str(_ROOT / "tests")]
    found: dict[str, list[Pause]] = {}
    for pause in measure(_SIZES[scale], _ROUNDS if scale == "full" else 2):
        print(f"{pause}", flush=True)
        found.setdefault(pause.way, []).append(pause)
    pauses = {way: median(one.pause_s for one in each) for way, each in found.items()}
    for way, pause_s in pauses.items():
        update_s = median(one.update_s for one in found[way])
        usual_s = median(one.usual_s for one in found[way])
        print(f"{way}: pause {pause_s:.3f} s, update {update_s:.3f} s, request {usual_s:.3f} s")
    print(f"pause in place / handed over: {pauses['in place'] / pauses['handed over']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
