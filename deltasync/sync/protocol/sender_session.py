"""The sender's end of a sync as a table: what may come when, and what follows. Does no I/O.

`SENDER`, at the end, has it all, and docs/wire-format.md shows it with a diagram. What it does not
allow raises and changes nothing.

Digests prove that members hold a version. The digest is a sum over elements: a rank that holds
parameters whole must arrive at a digest of its own. Ranks that hold parts add up to the digests of
those parameters, each as often as all of them together hold it: once if they split it, several
times if they replicate it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

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


@dataclass(frozen=True, slots=True)
class Member:
    """A receiver as its sender knows it.

    Attributes:
        peer: Its number at the transport.
        engine, rank, world: Which engine it serves, and its place there.
        holds: Numbers of the layout's parameters that it holds something of; None for all.
        copies: If it holds parts: uint64[parameters], how often the ranks of its engine that do so
            hold each parameter, all together.
        connection: What names it on the lanes of the trainer's other ranks, if there are any.
        max_staged_bytes: Memory that it stages with; a sync that takes more it writes in place.
    """

    peer: int
    engine: str
    rank: int = 0
    world: int = 1
    holds: frozenset[int] | None = None
    copies: Copies | None = field(default=None, compare=False)
    connection: str = ""
    max_staged_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.engine}[{self.rank}/{self.world}]"


def copies(
    specs: Sequence[ParameterSpec], held: Iterable[tuple[Collection[int] | None, Parts]]
) -> Copies:
    """uint64[parameters]: how often some ranks of an engine hold each parameter, all together.

    Args:
        specs: The layout.
        held: Of each rank the parameters that it holds something of, None for all, and the parts.

    Raises:
        LayoutMismatch: They do not hold every element of a parameter equally often.
    """
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
    return times.astype(np.uint64)


DigestCheck = tuple[frozenset[int], Copies | None]
"""Peers whose digests prove together that they hold a version, and uint64[parameters], how often
they hold each parameter; None for once, all of them. One receiver, or the ranks of an engine that
hold parts.
"""


def digest_checks(members: Iterable[Member], num_parameters: int) -> list[DigestCheck]:
    """What is compared of members, given all ranks of their engines."""
    together: dict[str | int, list[Member]] = defaultdict(list)
    for member in members:
        together[member.peer if member.copies is None else member.engine].append(member)
    checks: list[DigestCheck] = []
    for first, *others in together.values():
        held = first.copies
        if held is None and first.holds is not None:
            held = np.zeros(num_parameters, np.uint64)
            held[list(first.holds)] = 1
        checks.append((frozenset(m.peer for m in (first, *others)), held))
    return checks


def peers_with_wrong_digest(
    checks: Iterable[DigestCheck], digests: Mapping[int, int], version: Digests
) -> set[int]:
    """Peers that do not hold, or would not arrive at, a version.

    Args:
        checks: Of the members in question.
        digests: What they said, by peer. A check is left out if one of its peers said nothing.
        version: The digests of the version.
    """
    wrong: set[int] = set()
    for peers, held in checks:
        if peers <= digests.keys():
            found = sum(digests[peer] for peer in peers) & MASK
            if found != version.digest_of(held):
                wrong |= peers
    return wrong


class SenderPhase(Enum):
    """Where the sender stands in a sync."""

    IDLE = auto()  # no sync is under way
    STAGING = auto()  # participants stage a version that is not decided
    DECIDED = auto()  # the version is final; participants write it


@dataclass
class SenderSession:
    """Who takes part, and what may be decided. The unit of failure is the engine.

    Attributes:
        version: The last version decided.
        members: Those that hold it, by peer.
        failures: Why participants of the current sync failed, by peer.
        attempt: Number of the current sync among all attempts.
    """

    version: int = 0
    phase: SenderPhase = SenderPhase.IDLE
    members: dict[int, Member] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    participants: dict[int, Member] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _offered: int = 0
    attempt: int = 0

    def captured(self, version: int) -> None:
        """A new version was taken from the source; nobody holds it yet."""
        self._on("captured")
        self.version = version

    def admit(self, members: Iterable[Member]) -> None:
        """Receivers hold the version already: they are members."""
        self._on("admit")
        self.members.update({member.peer: member for member in members})

    def left(self, peer: int) -> None:
        """A member is none any more."""
        self._on("left")
        self.members.pop(peer)

    def begin(self, participants: Iterable[Member], *, version: int) -> None:
        """A sync to `version` begins."""
        self._on("begin", version)
        self.participants = {member.peer: member for member in participants}
        self._done, self.failures, self._offered = set(), {}, version
        self.attempt += 1

    def prepared(self, peer: int) -> None:
        """A participant can commit, and would arrive at the sender's digest."""
        self._on("prepared")
        self._done.add(self.participants[peer].peer)

    def failed(self, peer: int, reason: str, *, is_own: bool = False) -> None:
        """A participant failed. What it has said itself counts more than what is known here."""
        self._on("failed")
        if is_own or self.participants[peer].peer not in self.failures:
            self.failures[peer] = reason
        self._done.discard(peer)

    def spare(
        self, incomplete: Mapping[int, str], asleep: Collection[int], *, may_repeat: bool
    ) -> bool:
        """Participants that miss a payload stay if another attempt serves them, else have failed.

        Args:
            incomplete: Why they have not prepared, by peer.
            asleep: Peers that have failed, and were not lost.
            may_repeat: Whether there can be another attempt, which costs the others nothing.

        Returns whether the version has to be aborted for them.
        """
        self._on("spare")
        lost = self._failed_engines(asleep)  # nobody else can have a payload that is missing
        for peer, reason in incomplete.items():
            if not (may_repeat and lost) or self.participants[peer].engine in lost:
                self.failed(peer, reason)
        return not incomplete.keys() <= self.failures.keys()

    def narrow(self, engines: Collection[str]) -> list[Member]:
        """Only these engines go on. Returns the ranks of the others, which have to leave."""
        self._on("narrow")
        leaving = [m for m in self.participants.values() if m.engine not in engines]
        failed = self._failed_engines()
        for member in leaving:
            if member.engine not in failed:
                self.failures[member.peer] = "its engine was left out of the version"
            del self.participants[member.peer]
            self._done.discard(member.peer)
            self.members.pop(member.peer, None)
        return leaving

    def decide(self) -> None:
        """The version is final. Raises CallOrderError unless every participant has prepared."""
        self._on("decide")
        self.version, self._done = self._offered, set()

    def abort(self, asleep: Collection[int] = ()) -> list[Member]:
        """The version will never be. Returns who has to leave: every rank of a failed engine.

        Peers that are `asleep` have failed, and need not leave for that.
        """
        self._on("abort")
        return self._leave(asleep)

    def committed(self, peer: int) -> None:
        """A participant has written the version and read back the sender's digest."""
        self._on("committed")
        self._done.add(self.participants[peer].peer)

    def undone(self, engines: Collection[str]) -> tuple[str, ...]:
        """Those of these engines of which a rank has not committed: their other ranks undo."""
        self._on("undone")
        missing = set(self.participants) - self._done
        found = {self.participants[peer].engine for peer in missing}
        return tuple(sorted(found.intersection(engines)))

    def finish(self) -> list[Member]:
        """The sync is over. Returns who has to leave: every rank of an undone engine."""
        self._on("finish")
        for peer in set(self.participants) - self._done:
            self.failures.setdefault(peer, "did not commit")
        leaving = self._leave()
        gone = {member.peer for member in leaving}
        self.members.update({peer: m for peer, m in self.participants.items() if peer not in gone})
        return leaving

    def reset(self) -> None:
        """Nothing is under way any more, wherever that was, and nobody is a member."""
        self._on("reset")
        self.members, self.participants = {}, {}

    def _leave(self, asleep: Collection[int] = ()) -> list[Member]:
        engines = self._failed_engines(asleep)
        leaving = [m for m in self.participants.values() if m.engine in engines]
        for member in leaving:
            self.members.pop(member.peer, None)
        return leaving

    def _failed_engines(self, asleep: Collection[int] = ()) -> set[str]:
        """Those that still take part."""
        failed = self.participants.keys() & self.failures.keys() - set(asleep)
        return {self.participants[peer].engine for peer in failed}

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
        if not self.participants or self._done != set(self.participants):
            raise CallOrderError("not every participant has prepared")


def ranks_beside(members: Mapping[int, Member], peers: Collection[int]) -> list[Member]:
    """All ranks of the engines that have one of these peers."""
    engines = {members[peer].engine for peer in peers if peer in members}
    return [member for member in members.values() if member.engine in engines]


def judge(
    session: SenderSession, digests: Mapping[int, int], version: Digests, num_parameters: int
) -> None:
    """Participants have prepared if they would arrive at the version, and failed if not.

    A delta on other weights than its base ends here.

    Args:
        session: Of the sync under way.
        digests: Those that participants would arrive at, by peer.
        version: The digests of the version.
        num_parameters: Of the layout.
    """
    checks = digest_checks(session.participants.values(), num_parameters)
    wrong = peers_with_wrong_digest(checks, digests, version)
    for peer in digests:
        if peer in wrong:
            session.failed(peer, "DigestMismatch: it would not arrive at our weights")
        else:
            session.prepared(peer)


def _rules() -> list[Rule[SenderPhase]]:
    idle, staging, decided = SenderPhase
    s = SenderSession
    return [
        Rule((idle,), "captured", do=s._check_nobody_misses),
        Rule((idle,), "admit"),
        Rule((idle,), "begin", staging, do=s._check_not_older),
        Rule((staging,), "prepared"),
        Rule((staging, decided), "failed"),
        Rule((staging,), "spare"),
        Rule((staging,), "narrow"),
        Rule((staging,), "decide", decided, do=s._check_all_prepared),
        Rule((staging,), "abort", idle),
        Rule((decided,), "committed"),
        Rule((decided,), "undone"),
        Rule((decided,), "finish", idle),
        Rule((idle, staging, decided), "left"),
        Rule((idle, staging, decided), "reset", idle),
    ]


SENDER = by_state(_rules())
"""Which methods of a `SenderSession` may be called in a phase, and the phase that follows."""
