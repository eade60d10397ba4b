"""Who comes in: greetings, refusals, and joining by digest alone."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from deltasync.delta.ledger import digest_text
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    LayoutMismatch,
    TransportError,
    TransportTimeout,
    UnsupportedVersion,
    WireError,
)
from deltasync.sync.protocol.links import SenderLink, reason_of
from deltasync.sync.protocol.round import Owner
from deltasync.sync.protocol.sender_session import Engine, Rank, copies
from deltasync.sync.source.layout import SentLayout, check_engine
from deltasync.sync.source.weights import Weights
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

_PATIENCE_S = 600.0  # with an engine of which no rank has come for so long
_MAX_INCOMPLETE = 1024
_MAX_INCOMPLETE_BYTES = 1 << 30
_MAX_DECLINED = 64
_MAX_REFUSAL = 300  # characters


Greetings = dict[str, dict[int, Hello]]
"""Engines by name: what their ranks have said, by peer."""


class Lobby:
    """Receivers that have greeted and are no members yet.

    An engine comes in when all its ranks are here, if its `owner` admits it. Receivers have to have
    `num_lanes` to the other ranks of the trainer.

    Attributes:
        lost: Where it is noted why engines were refused, by name. Not owned.
    """

    def __init__(self, link: SenderLink[Message], owner: Owner, *, num_lanes: int = 0) -> None:
        self._link, self._owner, self._num_lanes = link, owner, num_lanes
        self._waiting: dict[int, _Arrival] = {}
        self._declined: deque[Failed] = deque(maxlen=_MAX_DECLINED)
        self.lost: dict[str, str] = {}
        self._last_refusal = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def newcomers(self, taken: Collection[str]) -> Greetings:
        """Complete engines. Those whose name is taken are refused."""
        engines = self.engines()
        for name in engines.keys() & taken:
            for peer in engines.pop(name):
                self.refuse(peer, ConfigError(f"an engine named {name!r} is a member already"))
        return engines

    def listen(self, *, timeout_s: float) -> None:
        """Take in whoever has connected. Lets go of who waits for other ranks in vain."""
        for peer, hello, num_bytes in self._link.greetings(timeout_s=timeout_s):
            self._take_in(peer, hello, num_bytes)
        for peer in [p for p in self._waiting if not self._link.transport.is_connected(p)]:
            del self._waiting[peer]
        self._let_go_of_incomplete()

    def _take_in(self, peer: int, hello: Message | WireError, num_bytes: int) -> None:
        if isinstance(hello, Failed):
            engine = hello.reason.partition(": ")[0]
            if self._owner.admits(engine):  # else it means an earlier sender
                self._declined.append(hello)
            self.forget(peer)
        elif not isinstance(hello, Hello):
            self.refuse(peer, hello if isinstance(hello, WireError) else WireError("no hello"))
        elif FORMAT_VERSION not in hello.format_versions:
            theirs = f"the receiver {list(hello.format_versions[:9])}: upgrade one of them"
            error = UnsupportedVersion(f"this sender speaks format {FORMAT_VERSION}, {theirs}")
            self.refuse(peer, error)
        elif not self._owner.admits(hello.engine):
            self.refuse(peer, ConfigError("this sender has let other engines connect"))
        elif hello.lanes != self._num_lanes:
            problem = f"{hello.lanes} lanes, this trainer sends on {self._num_lanes}"
            self.refuse(peer, ConfigError(f"{problem}: give the receiver as many"))
        else:
            num_names = sum(len(names) for names, *_ in hello.parameters)
            memory = 4 * num_bytes + 64 * num_names + 160 * len(hello.parameters)  # once it is read
            self._waiting[peer] = _Arrival(hello, time.monotonic(), memory)

    def _let_go_of_incomplete(self) -> None:
        """Refuse engines that wait for ranks too long; those first that have done so longest."""
        whole = {peer for hellos in self.engines().values() for peer in hellos}
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

    def forget_strangers(self) -> None:
        """End the connections of engines that are let in no more."""
        for peer, arrival in list(self._waiting.items()):
            if not self._owner.admits(arrival.hello.engine):
                self.forget(peer)

    def declined(self) -> list[Failed]:
        """Why engines that were let connect cannot take part: what is new since the last call."""
        reasons = list(self._declined)
        self._declined.clear()
        return reasons

    def last_refusal(self) -> str:
        """Why the last connection was refused, if one was since the last call."""
        reason, self._last_refusal = self._last_refusal, ""
        return reason

    def engines(self) -> Greetings:
        """The complete engines, in order of arrival.

        At most one of each name: whoever claims the same name with another world waits.
        """
        ranks: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        for peer, arrival in self._waiting.items():
            hello = arrival.hello  # a later greeting of a rank replaces an earlier one
            ranks[hello.engine, hello.world][hello.rank] = peer
        complete: Greetings = {}
        for (engine, world), here in ranks.items():
            if len(here) == world:
                hellos = {peer: self._waiting[peer].hello for peer in here.values()}
                complete.setdefault(engine, hellos)
        return complete

    def take(self, engine: str, hellos: dict[int, Hello], layout: SentLayout) -> Engine | None:
        """An engine that has greeted; None, and it is refused, if it does not fit."""
        try:
            held = check_engine(layout, hellos.values())
        except (LayoutMismatch, WireError) as error:
            self.refuse_all(hellos, error)
            return None
        for peer in hellos:
            del self._waiting[peer]
        ranks = {
            peer: Rank(hello.rank, holds, hello.connection or "")
            for (peer, hello), holds in zip(hellos.items(), held, strict=True)
        }
        return Engine(engine, ranks)

    def forget(self, peer: int) -> None:
        """End the connection of a receiver that did not come in."""
        self._waiting.pop(peer, None)
        self._link.drop(peer)

    def refuse_all(self, hellos: dict[int, Hello], error: DeltaSyncError) -> None:
        """Refuse an engine."""
        for peer, hello in hellos.items():
            self.lost[hello.engine] = f"refused: {error}"
            self.refuse(peer, error)

    def refuse(self, peer: int, error: DeltaSyncError) -> None:
        """Say why, and end the connection."""
        self._last_refusal = reason_of(error)[:_MAX_REFUSAL]
        if not self._link.open([peer]):
            with suppress(TransportError):
                self._link.send(Refused(error=type(error).__name__, reason=as_text(error)))
        self.forget(peer)


class _Arrival(NamedTuple):
    """A greeting, when it came on the monotonic clock, and the memory that it takes, at most."""

    hello: Hello
    at_s: float
    num_bytes: int


def join(
    link: SenderLink[Message],
    joiners: Sequence[Engine],
    weights: Weights,
    stream_id: str,
    version: int,
) -> tuple[list[Engine], list[Engine]]:
    """Tell engines the layout, and by their digests which of them need a full sync.

    One rank that disagrees or is lost counts for its whole engine. Nobody is dropped here.

    Returns:
        Engines that hold the version already, and those that wait for a full sync. `failures` of
        the others say why they are gone.
    """
    layout = weights.layout
    for engine in joiners:
        engine.begin()
    here = _reached(link, joiners)
    if not here:
        return [], []
    with suppress(TransportError):  # then a reply is missing
        link.send(
            Layout(
                stream_id=stream_id,
                version=version,
                parameters=entries(layout.specs),
                digest=digest_text(weights.digests.total),
            )
        )
    replies = link.replies()
    needing = {engine for engine in here if _take_held(engine, replies, layout.specs)}
    here = [engine for engine in here if not engine.failures]
    weights.learn_digests([engine.copies for engine in here])
    differ = [e for e in here if e in needing or not e.is_at(weights.digests)]
    here = _reached(link, here)
    if here:
        with suppress(TransportError):  # who was lost is found out by the next round
            link.send(Welcome(full_sync=tuple(sorted(engine.name for engine in differ))))
    return [e for e in here if e not in differ], [e for e in here if e in differ]


def _reached(link: SenderLink[Message], engines: Sequence[Engine]) -> list[Engine]:
    """Speak to those that can be reached, all their ranks, and return them."""
    here = list(engines)
    while here and (failed := link.open([peer for engine in here for peer in engine.ranks])):
        for engine in here:
            engine.failures = {p: reason_of(failed[p]) for p in engine.ranks if p in failed}
        here = [engine for engine in here if not engine.failures]
    return here


def _take_held(
    engine: Engine,
    replies: Mapping[int, Message | DeltaSyncError],
    specs: Sequence[ParameterSpec],
) -> bool:
    """Note what an engine holds, or why it fails. Whether it needs a full sync for sure."""
    held = dict[int, Held]()
    for peer in engine.ranks:
        if isinstance(reply := replies[peer], Held):
            held[peer] = reply
            engine.digests[peer] = int(reply.digest, 16)
        else:
            engine.failures[peer] = reason_of(reply, answered="answered the layout")
    if engine.failures:
        return False
    each = [(engine.ranks[peer].holds, dict(one.parts)) for peer, one in held.items()]
    try:
        engine.copies = copies(specs, each)
    except LayoutMismatch as error:
        engine.fail(reason_of(error))
    engine.max_staged_bytes = min(one.max_staged_bytes for one in held.values())
    return any(one.half_written for one in held.values())
