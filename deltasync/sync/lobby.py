"""Who comes in: greetings, refusals, and joining by digest alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from deltasync.delta.snapshot import Snapshot
from deltasync.errors import DeltaSyncError, LayoutMismatch, TransportError, WireError
from deltasync.sync.layout import SourceLayout, check_coverage
from deltasync.sync.link import SenderLink
from deltasync.sync.session import Member
from deltasync.wire.frame import FORMAT_VERSION
from deltasync.wire.messages import (
    Held,
    Hello,
    Layout,
    Message,
    Refused,
    Welcome,
    digest_text,
    entries,
)


class Lobby:
    """Receivers that have greeted and are no members yet.

    An engine comes in when all its ranks are here.
    """

    def __init__(self, link: SenderLink) -> None:
        self._link = link
        self._waiting: dict[int, Hello] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def listen(self, *, timeout_s: float) -> None:
        """Take in whoever has connected."""
        for peer, hello in self._link.greetings(timeout_s=timeout_s):
            if not isinstance(hello, Hello):
                self.refuse(peer, hello if isinstance(hello, WireError) else WireError("no hello"))
            elif FORMAT_VERSION not in hello.format_versions:
                self.refuse(peer, WireError(f"this sender speaks format {FORMAT_VERSION}"))
            else:
                self._waiting[peer] = hello
        for peer in [p for p in self._waiting if not self._link.is_connected(p)]:
            del self._waiting[peer]

    def engines(self) -> list[dict[int, Hello]]:
        """The complete engines: each a receiver by peer for all its ranks, in order of arrival."""
        ranks: dict[str, dict[int, int]] = {}
        for peer, hello in self._waiting.items():
            ranks.setdefault(hello.engine, {})[hello.rank] = peer  # a later greeting replaces
        found: list[dict[int, Hello]] = []
        for peers in ranks.values():
            hellos = {peer: self._waiting[peer] for peer in peers.values()}
            world = max(hello.world for hello in hellos.values())
            if set(peers) == set(range(world)):
                found.append(hellos)
        return found

    def take(self, hellos: dict[int, Hello], layout: SourceLayout) -> list[Member]:
        """An engine's receivers as members; none, and they are refused, if they do not fit."""
        try:
            held = {peer: layout.numbers_held(hello) for peer, hello in hellos.items()}
            engine = next(iter(hellos.values())).engine
            check_coverage(layout.specs, list(held.values()), engine=engine)
        except (LayoutMismatch, WireError) as error:
            for peer in hellos:
                self.refuse(peer, error)
            return []
        for peer in hellos:
            del self._waiting[peer]
        return [
            Member(peer, hello.engine, hello.rank, hello.world, held[peer])
            for peer, hello in hellos.items()
        ]

    def refuse(self, peer: int, error: DeltaSyncError) -> None:
        """Say why, and end the connection."""
        self._waiting.pop(peer, None)
        if not self._link.open([peer]):
            with suppress(TransportError):
                self._link.send(Refused(error=type(error).__name__, reason=str(error)[:4096]))
        self._link.drop(peer)


def greet_back(
    link: SenderLink,
    joiners: Sequence[Member],
    snapshot: Snapshot,
    *,
    stream_id: str,
    version: int,
) -> tuple[list[Member], list[Member], dict[str, str]]:
    """Tell joiners the layout and learn whose weights agree with the snapshot.

    Returns:
        Members that hold the version already, members that need a full sync, and why
        others were lost. One rank that disagrees or is lost counts for its whole engine.
    """
    layout = Layout(
        stream_id=stream_id,
        version=version,
        parameters=entries(snapshot.specs),
        digest=digest_text(snapshot.ledger.total),
    )
    replies = _ask(link, joiners, layout)
    lost = {m: _problem(replies.get(m.peer)) for m in joiners if _problem(replies.get(m.peer))}
    gone = {member.engine for member in lost}
    for member in joiners:
        if member.engine in gone:
            link.drop(member.peer)
    here = [m for m in joiners if m.engine not in gone]
    differ = {m.engine for m in here if not _agrees(replies[m.peer], m, snapshot)}
    if here and not link.open([m.peer for m in here]):
        with suppress(TransportError):  # who was lost is found out by the round that follows
            link.send(Welcome(full_sync=tuple(sorted(differ))))
    agreed = [m for m in here if m.engine not in differ]
    return agreed, [m for m in here if m.engine in differ], {str(m): why for m, why in lost.items()}


def _ask(
    link: SenderLink, joiners: Sequence[Member], layout: Layout
) -> dict[int, Message | DeltaSyncError]:
    failed = link.open([member.peer for member in joiners])
    if failed:
        return dict(failed)
    with suppress(TransportError):  # then a reply is missing
        link.send(layout)
    return link.replies()


def _problem(reply: Message | DeltaSyncError | None) -> str:
    match reply:
        case Held():
            return ""
        case None:
            return "not reached"
        case DeltaSyncError():
            return f"{type(reply).__name__}: {reply}"
        case _:
            return f"answered the layout with {reply.kind}"


def _agrees(reply: Message | DeltaSyncError, member: Member, snapshot: Snapshot) -> bool:
    expected = digest_text(snapshot.ledger.total_of(member.holds))
    return isinstance(reply, Held) and reply.digest == expected
