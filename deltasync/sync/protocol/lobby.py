"""Who comes in: greetings, refusals, and joining by digest alone."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from deltasync.delta.ledger import digest_text
from deltasync.delta.snapshot import Digests
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    EngineFailed,
    LayoutMismatch,
    SyncAborted,
    TransportError,
    TransportTimeout,
    UnsupportedVersion,
    WireError,
)
from deltasync.sync.protocol.links import SenderLink, reason_of
from deltasync.sync.protocol.round import Turns
from deltasync.sync.protocol.sender_session import (
    Copies,
    DigestCheck,
    Member,
    copies,
    digest_checks,
    peers_with_wrong_digest,
)
from deltasync.sync.source.layout import SentLayout, check_engine
from deltasync.wire.frame import FORMAT_VERSION
from deltasync.wire.messages import (
    Failed,
    Held,
    Hello,
    Layout,
    Message,
    ParameterSpec,
    Refused,
    Welcome,
    as_text,
    entries,
)

_CATCH_UP_S = 0.2  # of reading greetings beyond the first: the next call reads the rest
_PATIENCE_S = 600.0  # with an engine of which no rank has come for so long
_MAX_INCOMPLETE = 1024
_MAX_INCOMPLETE_BYTES = 1 << 30
_MAX_DECLINED = 64
_MAX_REFUSAL = 300  # characters


class Lobby:
    """Receivers that have greeted and are no members yet.

    An engine comes in when all its ranks are here, and `admits` takes its name. Receivers have to
    have `num_lanes` to the other ranks of the trainer.
    """

    def __init__(
        self, link: SenderLink, admits: Callable[[str], bool], *, num_lanes: int = 0
    ) -> None:
        self._link, self._admits, self._num_lanes = link, admits, num_lanes
        self._retained: Collection[str] | None = None
        self._waiting: dict[int, _Arrival] = {}
        self._declined: deque[Failed] = deque(maxlen=_MAX_DECLINED)
        self._refused: dict[str, str] = {}
        self._last_refusal = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def newcomers(self, taken: Collection[str]) -> list[dict[int, Hello]]:
        """Complete engines. Those whose name is taken are refused."""
        engines = self.engines()
        for peer, hello in [item for hellos in engines for item in hellos.items()]:
            if hello.engine in taken:
                self.refuse(
                    peer, ConfigError(f"an engine named {hello.engine!r} is a member already")
                )
        return [e for e in engines if not any(hello.engine in taken for hello in e.values())]

    def raise_declined(self) -> None:
        """Raise EngineFailed if receivers have reported that they cannot take part."""
        if declined := self.declined():
            whys = sorted(set(map(reason_of, declined)))
            raise EngineFailed("; ".join(whys))

    def too_few(self, who_came: str) -> TransportTimeout:
        """The error if too few have come in time."""
        refused = self.last_refusal()
        why = f"; the last one refused: {refused}" if refused else ""
        return TransportTimeout(f"{who_came}{why}")

    def listen(self, *, timeout_s: float) -> None:
        """Take in whoever has connected. Lets go of who waits for other ranks in vain."""
        came = self._link.greetings(timeout_s=timeout_s)
        end = time.monotonic() + _CATCH_UP_S
        while came:
            for peer, hello, num_bytes in came:
                self._take_in(peer, hello, num_bytes)
            came = self._link.greetings(timeout_s=0) if time.monotonic() < end else []
        for peer in [p for p in self._waiting if not self._link.transport.is_connected(p)]:
            del self._waiting[peer]
        self._let_go_of_incomplete()

    def _take_in(self, peer: int, hello: Message | WireError, num_bytes: int) -> None:
        if isinstance(hello, Failed):
            if self._admits(hello.reason.partition(": ")[0]):  # else it means an earlier sender
                self._declined.append(hello)
            self.forget(peer)
        elif not isinstance(hello, Hello):
            self.refuse(peer, hello if isinstance(hello, WireError) else WireError("no hello"))
        elif FORMAT_VERSION not in hello.format_versions:
            self.refuse(peer, UnsupportedVersion(f"this sender speaks format {FORMAT_VERSION}"))
        elif not self.admits(hello.engine):
            self.refuse(peer, ConfigError("this sender has let other engines connect"))
        elif hello.lanes != self._num_lanes:
            problem = f"{hello.lanes} lanes, this trainer sends on {self._num_lanes}"
            self.refuse(peer, ConfigError(f"{problem}: give the receiver as many"))
        else:
            self._waiting[peer] = _Arrival(hello, time.monotonic(), _memory_of(hello, num_bytes))

    def _let_go_of_incomplete(self) -> None:
        """Refuse engines that wait for ranks too long; those first that have done so longest."""
        whole = {peer for engine in self.engines() for peer in engine}
        groups: dict[tuple[str, int], dict[int, _Arrival]] = defaultdict(dict)
        for peer, arrival in self._waiting.items():
            if peer not in whole:
                groups[arrival.hello.engine, arrival.hello.world][peer] = arrival
        last_came = {key: max(one.at_s for one in groups[key].values()) for key in groups}
        sizes = {key: sum(one.num_bytes for one in groups[key].values()) for key in groups}
        count, num_bytes = sum(map(len, groups.values())), sum(sizes.values())
        for key in sorted(groups, key=last_came.__getitem__):
            is_late = time.monotonic() - last_came[key] > _PATIENCE_S
            if is_late or count > _MAX_INCOMPLETE or num_bytes > _MAX_INCOMPLETE_BYTES:
                count -= len(groups[key])
                num_bytes -= sizes[key]
                problem = f"{len(groups[key])} of {key[1]} ranks of engine {key[0]!r} have come"
                error = TransportTimeout(f"{problem}: start the others, then connect again")
                for peer in groups[key]:
                    self.refuse(peer, error)

    def retain(self, engines: Collection[str]) -> None:
        """Let in these engines alone from now on."""
        self._retained = frozenset(engines)
        self.forget_strangers()

    def forget_strangers(self) -> None:
        """End the connections of engines that are let in no more."""
        for peer, arrival in list(self._waiting.items()):
            if not self.admits(arrival.hello.engine):
                self.forget(peer)

    def ranks(self) -> Counter[str]:
        """Ranks of engines all of whose ranks have greeted, by the engine's name."""
        return Counter(h.engine for hellos in self.engines() for h in hellos.values())

    def declined(self) -> list[Failed]:
        """Why engines that were let connect cannot take part: what is new since the last call."""
        reasons = list(self._declined)
        self._declined.clear()
        return reasons

    def refused(self) -> dict[str, str]:
        """Why engines were refused, by name: what is new since the last call."""
        reasons, self._refused = self._refused, {}
        return reasons

    def last_refusal(self) -> str:
        """Why the last connection was refused, if one was since the last call."""
        reason, self._last_refusal = self._last_refusal, ""
        return reason

    def engines(self) -> list[dict[int, Hello]]:
        """The complete engines: each a receiver by peer for all its ranks, in order of arrival.

        At most one of each name: whoever claims the same name with another world waits.
        """
        ranks: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        for peer, arrival in self._waiting.items():
            hello = arrival.hello  # a later greeting of a rank replaces an earlier one
            ranks[hello.engine, hello.world][hello.rank] = peer
        complete: dict[str, dict[int, Hello]] = {}
        for (engine, world), here in ranks.items():
            if len(here) == world:
                hellos = {peer: self._waiting[peer].hello for peer in here.values()}
                complete.setdefault(engine, hellos)
        return list(complete.values())

    def take(self, hellos: dict[int, Hello], layout: SentLayout) -> list[Member]:
        """An engine's receivers as members; none, and they are refused, if they do not fit."""
        try:
            held = dict(zip(hellos, check_engine(layout, hellos.values()), strict=True))
        except (LayoutMismatch, WireError) as error:
            self.refuse_all(hellos, error)
            return []
        for peer in hellos:
            del self._waiting[peer]
        return [
            Member(
                peer,
                hello.engine,
                hello.rank,
                hello.world,
                held[peer],
                connection=hello.connection or "",
            )
            for peer, hello in hellos.items()
        ]

    def forget(self, peer: int) -> None:
        """End the connection of a receiver that did not come in."""
        self._waiting.pop(peer, None)
        self._link.drop(peer)

    def refuse_all(self, hellos: dict[int, Hello], error: DeltaSyncError) -> None:
        """Refuse an engine."""
        for peer, hello in hellos.items():
            self._refused[hello.engine] = f"refused: {error}"
            self.refuse(peer, error)

    def refuse(self, peer: int, error: DeltaSyncError) -> None:
        """Say why, and end the connection."""
        self._last_refusal = reason_of(error)[:_MAX_REFUSAL]
        if not self._link.open([peer]):
            with suppress(TransportError):
                self._link.send(Refused(error=type(error).__name__, reason=as_text(error)))
        self.forget(peer)

    def admits(self, engine: str) -> bool:
        """Whether an engine of this name may come in."""
        return self._admits(engine) and (self._retained is None or engine in self._retained)


def names_of(engines: Iterable[Mapping[int, Hello]]) -> set[str]:
    """The names of engines, as of `Lobby.engines`."""
    return {hello.engine for hellos in engines for hello in hellos.values()}


def are_enough(turns: Turns, engines: Collection[str]) -> bool:
    """Whether these engines alone may take a version."""
    try:
        turns(engines, ())
    except SyncAborted:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A greeting, when it came on the monotonic clock, and the memory that it takes."""

    hello: Hello
    at_s: float
    num_bytes: int


def _memory_of(hello: Hello, num_bytes: int) -> int:
    """Bytes that a greeting of `num_bytes` takes once it is read, at most."""
    num_names = sum(len(names) for names, *_ in hello.parameters)
    return 4 * num_bytes + 64 * num_names + 160 * len(hello.parameters)


class Joining:
    """Engines on their way in: `introduce` the layout to them, then `welcome` them.

    One rank that disagrees or is lost counts for its whole engine. Nobody is dropped here.

    Attributes:
        agreed: Members that hold the version already.
        differ: Members that need a full sync and wait for it.
        lost: Why the others are gone, by member.
    """

    def __init__(self, link: SenderLink, joiners: Sequence[Member]) -> None:
        self._link, self._here = link, list(joiners)
        self._told: dict[int, Held] = {}
        self._checks: list[DigestCheck] = []
        self.agreed: list[Member] = []
        self.differ: list[Member] = []
        self.lost: dict[str, str] = {}

    def introduce(
        self, specs: tuple[ParameterSpec, ...], held: Digests, stream_id: str, version: int
    ) -> list[Copies | None]:
        """Send the layout, and hear what each holds.

        Returns the copies of which `welcome` compares digests.
        """
        layout = Layout(
            stream_id=stream_id,
            version=version,
            parameters=entries(specs),
            digest=digest_text(held.total),
        )
        self._open()
        if not self._here:
            return []
        with suppress(TransportError):  # then a reply is missing
            self._link.send(layout)
        replies = self._link.replies()
        self._told = {p: reply for p, reply in replies.items() if isinstance(reply, Held)}
        silent = {m: replies[m.peer] for m in self._here if m.peer not in self._told}
        why = {m: reason_of(said, answered="answered the layout") for m, said in silent.items()}
        self._leave_out(why)
        self._here = [
            replace(m, max_staged_bytes=self._told[m.peer].max_staged_bytes) for m in self._here
        ]
        self._note_parts(specs)
        self._checks = digest_checks(self._here, len(specs))
        return [check.copies for check in self._checks]

    def welcome(self, version: Digests) -> None:
        """Tell them whose weights are not those of the version, and need a full sync."""
        digests = {peer: int(held.digest, 16) for peer, held in self._told.items()}
        wrong = peers_with_wrong_digest(self._checks, digests, version)
        wrong |= {peer for peer, held in self._told.items() if held.half_written}
        differ = {m.engine for m in self._here if m.peer in wrong}
        self._open()
        if self._here:
            with suppress(TransportError):  # who was lost is found out by the next round
                self._link.send(Welcome(full_sync=tuple(sorted(differ))))
        self.agreed = [m for m in self._here if m.engine not in differ]
        self.differ = [m for m in self._here if m.engine in differ]

    def _open(self) -> None:
        """Speak to those that can be reached, whole engines only."""
        while self._here and (failed := self._link.open([m.peer for m in self._here])):
            self._leave_out({m: reason_of(failed[m.peer]) for m in self._here if m.peer in failed})

    def _leave_out(self, problems: Mapping[Member, str]) -> None:
        self.lost |= {str(member): why for member, why in problems.items()}
        gone = {member.engine for member in problems}
        self._here = [member for member in self._here if member.engine not in gone]

    def _note_parts(self, specs: Sequence[ParameterSpec]) -> None:
        """Note what ranks hold in part; engines whose parts do not add up are left out."""
        parts = {
            member: dict(reply.parts)
            for member in self._here
            if (reply := self._told[member.peer]).parts
        }
        problems: dict[Member, str] = {}
        known: dict[str, Copies] = {}
        for engine in {member.engine for member in parts}:
            ranks = [member for member in parts if member.engine == engine]
            try:
                known[engine] = copies(specs, [(member.holds, parts[member]) for member in ranks])
            except LayoutMismatch as error:
                problems |= dict.fromkeys(ranks, reason_of(error))
        self._here = [
            replace(m, copies=known.get(m.engine)) if m in parts else m for m in self._here
        ]
        self._leave_out(problems)
