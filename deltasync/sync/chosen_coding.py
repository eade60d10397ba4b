"""What a sender codes payloads with: what its options say, or what takes the least time."""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING

from deltasync.delta.backend import Plan
from deltasync.delta.codecs.choosing import CODING_COSTS, Work, cheapest, coding_s, costs_on
from deltasync.delta.codecs.coding import Coding
from deltasync.delta.policy import DEFAULT_COSTS
from deltasync.sync.options import SenderOptions

if TYPE_CHECKING:
    from deltasync.sync.protocol.round import RoundResult
    from deltasync.sync.source.weights import LocalWeights

logger = logging.getLogger(__name__)

_BYTES_PER_GBIT = 125e6
_DOUBT = 3.0  # work may take so many times as long as expected
_DELAY_S = 0.02  # the way there and back, and what schedulers take
_GROWTH = 1.05
_CALLS = 4  # that a link has to be slow in


class ChosenCoding:
    """The coding of each plan of one sender, and what is known of its link.

    With `compression="auto"` it is the cheapest one for the plan, on the link as `link_gbit_s` says
    or as payloads have shown. Nothing is chosen before a speed is known.

    Attributes:
        last: What was chosen last; chunks are compared by the policy for it.
        is_in_memory: Whether payloads stay in the memory of one host.
        bytes_per_s: What the link was seen to carry; infinite if nothing has shown a limit, None
            before the first measurement.
    """

    def __init__(self) -> None:
        self.last: Coding = "none"
        self.is_in_memory = False
        self.bytes_per_s: float | None = None
        self._most = deque[float](maxlen=_CALLS)
        self._told: set[str] = set()

    def speed(self, options: SenderOptions) -> float | None:
        """Bytes a second of the link, as given or as seen; None if they are not known."""
        if options.link_gbit_s is not None:
            return options.link_gbit_s * _BYTES_PER_GBIT
        return math.inf if self.is_in_memory else self.bytes_per_s

    def gbit_s(self, options: SenderOptions) -> float | None:
        """The same in Gbit/s; None also if there is no limit."""
        speed = self.speed(options)
        return None if speed is None or math.isinf(speed) else speed / _BYTES_PER_GBIT

    def choose(self, weights: LocalWeights, plan: Plan) -> Coding:
        """What the payloads of a plan of these weights are to be coded with."""
        options = weights.options
        if options.compression != "auto":
            return options.compression
        speed, is_full = self.speed(options), plan.base_version is None
        if speed is None or not plan.sparse_bytes + plan.dense_bytes:
            return "none" if is_full else self.last
        device_type = _device_type_of(weights)
        self._tell(device_type)
        coding = cheapest(_work_of(weights, plan), speed, costs_on(device_type))
        if not is_full:
            self.last = coding
        return coding

    def learn(self, weights: LocalWeights, plan: Plan, done: RoundResult) -> None:
        """A timed round was done with a plan: see how fast the link is, if all have answered."""
        if done.decided and not done.left and done.sent.num_buckets > 0:
            expected_s = _working_s(done.coding, weights, plan)
            self.took(done.sent.payload_bytes, done.answer_s, expected_s=expected_s)

    def took(self, num_bytes: int, seconds: float, *, expected_s: float = 0.0) -> None:
        """Payloads were sent: learn how fast the link is.

        It is at least as fast as if nothing else had been waited for. It is at most as fast as what
        is left of the time shows, if work at the ends took far longer than expected; of several
        calls the fastest counts, since others may have met a busy machine. What is known moves into
        these bounds, and grows slowly within them, since few bytes show no fast link.

        Args:
            num_bytes: Theirs.
            seconds: Until the other end had answered.
            expected_s: Of these, what work at both ends is expected to take.
        """
        least = num_bytes / max(seconds, 1e-9)
        rest = seconds - _DOUBT * expected_s - _DELAY_S
        self._most.append(num_bytes / rest if rest > 0 else math.inf)
        known = math.inf if self.bytes_per_s is None else self.bytes_per_s
        self.bytes_per_s = min(max(_GROWTH * known, least), max(self._most))

    def _tell(self, device_type: str) -> None:
        if device_type not in CODING_COSTS and device_type not in self._told:
            self._told.add(device_type)
            logger.info(
                "compression='auto': no codec was timed for weights on %s; those of hosts are used",
                device_type,
            )


def _work_of(weights: LocalWeights, plan: Plan) -> Work:
    layout = weights.layout
    assert layout is not None
    return Work.of(plan, layout.numel, layout.num_bytes)


def _device_type_of(weights: LocalWeights) -> str:
    """Where weights live: on another device than the host, if some do."""
    types = {flat.line.device.type for flat in weights.snapshot.flats.values()}
    return max(types, key=lambda name: name != "cpu", default="cpu")


def _working_s(coding: Coding, weights: LocalWeights, plan: Plan) -> float:
    """Seconds to code a plan, to decode it, and to stage it: about half of the rest of a sync."""
    work, device_type = _work_of(weights, plan), _device_type_of(weights)
    costs = DEFAULT_COSTS.get(device_type, DEFAULT_COSTS["cuda"])
    rest_ns = costs.dense_ns * work.numel if work.is_full else costs.sparse_ns * work.changes
    return coding_s(coding, work, costs_on(device_type)) + 0.5e-9 * rest_ns
