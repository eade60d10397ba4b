"""The sender of whoever owns engines: they are asked and parted with, besides syncs."""

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


class EngineSender(WeightSender):
    """A `WeightSender` whose owner starts, asks and drops the engines."""

    def declared(self, timeout_s: float) -> tuple[ParameterSpec, ...]:
        """What all ranks of the trainer hold, in the source's dtypes, or those of `wire_dtypes`.

        Raises SyncAborted if a rank does not come to `send_weights`, which is where it declares it.
        """
        with plain_mode(), self._caller.call():
            specs = self._weights.declared(timeout_s=timeout_s)
            return specs_of(specs, (), self.options.wire_dtypes)

    def check_newcomers(self, declared: Sequence[ParameterSpec]) -> None:
        """Raise ConfigError, by name, if engines that have greeted could not take these."""
        with plain_mode(), self._caller.call():
            for hellos in self._lobby.engines():
                held = [spec for hello in hellos.values() for spec in hello.specs()]
                specs = specs_of(declared, held, self.options.wire_dtypes)
                try:
                    check_engine(SentLayout(specs), hellos.values())
                except LayoutMismatch as error:
                    raise ConfigError(str(error)) from error

    def addresses_of_ranks(self) -> list[tuple[int, Address | None]]:
        """(rank, where it sends from) of the other ranks of the trainer, in order."""
        return sorted(self._group.addresses.items()) if self._group else []

    def listen(self, *, timeout_s: float) -> tuple[Counter[str], list[Failed]]:
        """Hear who has connected, for at most `timeout_s`, less if somebody does.

        Returns the number of ranks of each engine that is a member or has greeted with all of them,
        and why workers declined since the last call.
        """
        with plain_mode(), self._caller.call():
            self._lobby.listen(timeout_s=timeout_s)
            self._part_with_lost_members()
            return self.holders() + self._lobby.ranks(), self._lobby.declined()

    def holders(self) -> Counter[str]:
        """The number of ranks of each engine that holds the sender's version."""
        return Counter(member.engine for member in self._session.members.values())

    def let_go_of_strangers(self, why: str) -> None:
        """Part with engines that are admitted no more. They keep the weights that they have."""
        with plain_mode(), self._caller.call():
            lobby = self._lobby
            lobby.forget_strangers()
            members = self._session.members.values()
            self._part_with(why, [m for m in members if not lobby.admits(m.engine)])

    def ended_as(self, stats: SyncStats) -> SyncStats:
        """Return what the call under way comes to: so it is reported, and told other ranks."""
        self._done = stats
        return stats

    def lost(self) -> Mapping[str, str]:
        """Why members left in the last call of `send_weights`, also if that raised."""
        return self._lost

    def last_refusal(self) -> str:
        """Why the last connection was refused, if one was since the last call."""
        return self._lobby.last_refusal()
