"""What the owner of engines asks of their sender, besides syncs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from deltasync.delta.modes import plain_mode
from deltasync.errors import ConfigError, LayoutMismatch
from deltasync.sync.sender import WeightSender
from deltasync.sync.source.layout import SentLayout, check_engine, specs_of
from deltasync.sync.stats import SyncStats
from deltasync.transports.address import Address
from deltasync.wire.messages import Failed, ParameterSpec


def declared(sender: WeightSender, timeout_s: float) -> tuple[ParameterSpec, ...]:
    """What all ranks of the trainer hold, in the dtypes of the source, or those of `wire_dtypes`.

    Raises SyncAborted if a rank does not come to `send_weights`, which is where it declares it.
    """
    with plain_mode(), sender._caller.call():
        specs = sender._weights.declared(timeout_s=timeout_s)
        return specs_of(specs, (), sender.options.wire_dtypes)


def check_newcomers(sender: WeightSender, declared: Sequence[ParameterSpec]) -> None:
    """Raise ConfigError, by name, if engines that have greeted could not take what is declared."""
    with plain_mode(), sender._caller.call():
        for hellos in sender._lobby.engines():
            held = [spec for hello in hellos.values() for spec in hello.specs()]
            specs = specs_of(declared, held, sender.options.wire_dtypes)
            try:
                check_engine(SentLayout(specs), hellos.values())
            except LayoutMismatch as error:
                raise ConfigError(str(error)) from error


def addresses_of_ranks(sender: WeightSender) -> list[tuple[int, Address | None]]:
    """(rank, where it sends from) of the other ranks of the trainer, in order."""
    return sorted(sender._group.addresses.items()) if sender._group else []


def listen(sender: WeightSender, *, timeout_s: float) -> tuple[Counter[str], list[Failed]]:
    """Hear who has connected, for at most `timeout_s`, less if somebody does.

    Returns the number of ranks of each engine that is a member or has greeted with all of them, and
    why workers declined since the last call.
    """
    with plain_mode(), sender._caller.call():
        sender._lobby.listen(timeout_s=timeout_s)
        sender._part_with_lost_members()
        return holders(sender) + sender._lobby.ranks(), sender._lobby.declined()


def holders(sender: WeightSender) -> Counter[str]:
    """The number of ranks of each engine that holds the sender's version."""
    return Counter(member.engine for member in sender._session.members.values())


def let_go_of_strangers(sender: WeightSender, why: str) -> None:
    """Part with engines that the sender admits no more. They keep the weights that they have."""
    with plain_mode(), sender._caller.call():
        lobby = sender._lobby
        lobby.forget_strangers()
        members = sender._session.members.values()
        sender._part_with(why, [m for m in members if not lobby.admits(m.engine)])


def ended_as(sender: WeightSender, stats: SyncStats) -> SyncStats:
    """Return what the call under way comes to: so it is reported, and so the other ranks learn."""
    sender._done = stats
    return stats


def lost(sender: WeightSender) -> Mapping[str, str]:
    """Why members left in the last call of `send_weights`, also if that raised."""
    return sender._lost
