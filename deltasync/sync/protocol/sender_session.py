"""The sender's end of a sync as a table: what may come when, and what follows. Does no I/O.

`SENDER`, at the end, has it all, and docs/wire-format.md shows it with a diagram. What it does not
allow raises and changes nothing.

Digests prove that engines hold a version. The digest is a sum over elements: the ranks of an engine
add up to the digests of the parameters, each as often as all of them together hold it: once if they
split the model, several times if they replicate a part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.snapshot import Digests
from deltasync.errors import CallOrderError, LayoutMismatch
from deltasync.sync.protocol.table import Rule, by_state
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec

Copies = NDArray[np.uint64]
"""uint64[parameters]: how often some ranks hold each parameter."""

Parts = Mapping[int, int]
"""Elements held by a rank, of each parameter that it holds in part."""


class Rank(NamedTuple):
    """A receiver as its sender knows it.

    Attributes:
        number: Its place in its engine.
        holds: Numbers of the layout's parameters that it holds something of; None for all.
        connection: What names it on the lanes of the trainer's other ranks, if there are any.
    """

    number: int = 0
    holds: frozenset[int] | None = None
    connection: str = ""


@dataclass(eq=False)
class Engine:
    """An engine as its sender knows it. It is the unit of failure.

    Attributes:
        name: As it has greeted.
        ranks: All of them, by the number of the peer at the transport.
        copies: How often they hold each parameter, all together; None for once, all of them.
        max_staged_bytes: Memory that each stages with; a sync that takes more is written in place.
        failures: Why ranks failed in the sync under way, by peer.
        asleep: Those of them whose weights sleep: they need not leave for that.
        digests: Those that ranks hold, or would arrive at.
        done: Ranks that have prepared; once the version is decided, those that have committed.
    """

    name: str
    ranks: dict[int, Rank]
    copies: Copies | None = None
    max_staged_bytes: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    asleep: set[int] = field(default_factory=set)
    digests: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """Nothing is known of the sync that begins."""
        self.failures, self.asleep, self.digests, self.done = {}, set(), {}, set()

    def fail(self, reason: str) -> None:
        """All ranks have failed, for this reason where none is known."""
        self.failures = dict.fromkeys(self.ranks, reason) | self.failures

    def named(self, why: Mapping[int, str] | str) -> dict[str, str]:
        """Why ranks are lost, by their names: some for these reasons, or all for the same."""
        each = dict.fromkeys(self.ranks, why) if isinstance(why, str) else why
        total = len(self.ranks)
        return {f"{self.name}[{self.ranks[p].number}/{total}]": text for p, text in each.items()}

    @property
    def must_leave(self) -> bool:
        """Whether a rank has failed otherwise than by being asleep."""
        return not self.failures.keys() <= self.asleep

    @property
    def is_done(self) -> bool:
        """Whether all ranks are done, and none has failed."""
        return not self.failures and self.done == self.ranks.keys()

    def is_at(self, version: Digests) -> bool:
        """Whether all ranks together hold a version, or would arrive at it."""
        return sum(self.digests.values()) & MASK == version.digest_of(self.copies)


def copies(
    specs: Sequence[ParameterSpec], held: Sequence[tuple[Collection[int] | None, Parts]]
) -> Copies | None:
    """How often the ranks of an engine hold each parameter, all together; None for once, all.

    Args:
        specs: The layout.
        held: Of each rank, the parameters that it holds something of, None for all, and the parts.

    Raises:
        LayoutMismatch: They do not hold every element of a parameter equally often.
    """
    if held == [(None, {})]:
        return None
    numels = np.array([spec.numel for spec in specs], np.int64)
    total = np.zeros(len(specs), np.int64)
    for numbers, parts in held:
        here = np.zeros(len(specs), np.int64)
        known = np.arange(len(specs)) if numbers is None else np.array(sorted(numbers), np.int64)
        here[known] = numels[known]
        for number, numel in parts.items():
            if number >= len(specs) or here[number] == 0 or not 0 < numel <= numels[number]:
                raise LayoutMismatch(f"{numel} elements of parameter {number} cannot be held")
            here[number] = numel
        total += here
    times, rest = np.divmod(total, np.maximum(numels, 1))
    if rest.any():
        number = int(np.flatnonzero(rest)[0])
        raise LayoutMismatch(
            f"its ranks hold {total[number]} elements of {specs[number].name!r}, which has "
            f"{numels[number]}: start the engine on a checkpoint of the trainer's model"
        )
    return None if (total == numels).all() else times.astype(np.uint64)


class SenderPhase(Enum):
    """Where the sender stands in a sync."""

    IDLE = auto()  # no sync is under way
    STAGING = auto()  # participants stage a version that is not decided
    DECIDED = auto()  # the version is final; participants write it


@dataclass
class SenderSession:
    """Who takes part, and what may be decided.

    Attributes:
        version: The last version decided.
        members: Engines that hold it, by name. Owners may change this between syncs.
        participants: Those of the sync under way, by the peers of all their ranks.
        attempt: Number of the current sync among all attempts.
    """

    version: int = 0
    phase: SenderPhase = SenderPhase.IDLE
    members: dict[str, Engine] = field(default_factory=dict)
    participants: dict[int, Engine] = field(default_factory=dict)
    _offered: int = 0
    attempt: int = 0

    @property
    def engines(self) -> list[Engine]:
        """Those that take part."""
        return list(dict.fromkeys(self.participants.values()))

    def captured(self, version: int) -> None:
        """A new version was taken from the source; nobody holds it yet."""
        self._on("captured")
        self.version = version

    def begin(self, engines: Iterable[Engine], *, version: int) -> None:
        """A sync to `version` begins."""
        self._on("begin", version)
        self.participants = {peer: engine for engine in engines for peer in engine.ranks}
        for engine in self.engines:
            engine.begin()
        self._offered = version
        self.attempt += 1

    def prepared(self, peer: int, digest: int) -> None:
        """A participant can commit, and would arrive at this digest."""
        self._on("prepared")
        self.participants[peer].digests[peer] = digest
        self.participants[peer].done.add(peer)

    def judge(self, digests: Mapping[int, int], version: Digests) -> None:
        """Participants have prepared that would arrive at these digests; engines fail for whose
        ranks together they are not those of the version.

        A delta on other weights than its base ends here.
        """
        self._on("judge")
        for peer, digest in digests.items():
            self.prepared(peer, digest)
        for engine in self.engines:
            if engine.is_done and not engine.is_at(version):
                engine.fail("DigestMismatch: it would not arrive at our weights")

    def failed(self, peer: int, reason: str, *, is_own: bool = False) -> None:
        """A participant failed. What it has said itself counts more than what is known here."""
        self._on("failed")
        failures = self.participants[peer].failures
        if is_own or peer not in failures:
            failures[peer] = reason

    def narrow(self, leaving: Collection[Engine]) -> None:
        """Engines leave: those of which a rank has failed, and those that are left out."""
        self._on("narrow")
        for engine in leaving:
            if not engine.failures:
                engine.fail("its engine was left out of the version")
            for peer in engine.ranks:
                del self.participants[peer]
        self._left(leaving)

    def decide(self) -> None:
        """The version is final. Raises CallOrderError unless every participant has prepared."""
        self._on("decide")
        self.version = self._offered
        for engine in self.engines:
            engine.done = set()

    def abort(self) -> list[Engine]:
        """The version will never be. Returns the engines that have to leave."""
        self._on("abort")
        leaving = [engine for engine in self.engines if engine.must_leave]
        self._left(leaving)
        return leaving

    def committed(self, peer: int) -> None:
        """A participant has written the version and read back the digest that it predicted."""
        self._on("committed")
        self.participants[peer].done.add(peer)

    def finish(self) -> list[Engine]:
        """The sync is over. Returns the engines that have to leave: not all ranks committed."""
        self._on("finish")
        leaving = [engine for engine in self.engines if not engine.is_done]
        self.members |= {engine.name: engine for engine in self.engines if engine.is_done}
        self._left(leaving)
        return leaving

    def reset(self) -> None:
        """Nothing is under way any more, wherever that was, and nobody is a member."""
        self._on("reset")
        self.members, self.participants = {}, {}

    def _left(self, engines: Collection[Engine]) -> None:
        """They are no members any more."""
        for engine in engines:
            self.members.pop(engine.name, None)

    def _on(self, event: str, *said: object) -> None:
        """Go where the table leads. Raises CallOrderError, and changes nothing then."""
        for rule in SENDER[self.phase].get(event, ()):
            if rule.do is not None:
                rule.do(self, *said)
            assert rule.then is not None
            self.phase = rule.then
            return
        raise CallOrderError(f"{event} while {self.phase.name}")

    # What the table asks for. The documentation shows the docstrings.

    def _check_nobody_misses(self) -> None:
        """Refused if there are members."""
        if self.members:
            raise CallOrderError("members would miss the version")

    def _check_not_older(self, version: int) -> None:
        """Refused for an older version than the last."""
        if version < self.version:
            raise CallOrderError(f"v{version} after v{self.version}")

    def _check_all_prepared(self) -> None:
        """Refused unless every participant has prepared, and there is one."""
        if not self.participants or not all(engine.is_done for engine in self.engines):
            raise CallOrderError("not every participant has prepared")


def _rules() -> list[Rule[SenderPhase]]:
    idle, staging, decided = SenderPhase
    s = SenderSession
    return [
        Rule((idle,), "captured", do=s._check_nobody_misses),
        Rule((idle,), "begin", staging, do=s._check_not_older),
        Rule((staging,), "prepared"),
        Rule((staging, decided), "failed"),
        Rule((staging,), "judge"),
        Rule((staging,), "narrow"),
        Rule((staging,), "decide", decided, do=s._check_all_prepared),
        Rule((staging,), "abort", idle),
        Rule((decided,), "committed"),
        Rule((decided,), "finish", idle),
        Rule((idle, staging, decided), "reset", idle),
    ]


SENDER = by_state(_rules())
"""Which methods of a `SenderSession` may be called in a phase, and the phase that follows."""
