"""What the two tables of the protocol are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from deltasync.wire.messages import Message

State = TypeVar("State", bound=Enum)


class When(NamedTuple):
    """A condition: as the documentation shows it, and whether it holds."""

    text: str
    holds: Callable[..., bool]


@dataclass(frozen=True, slots=True)
class Rule(Generic[State]):
    """One line of a table.

    Attributes:
        states: Where it counts.
        on: What comes: the type of a message, or the name of a local event.
        then: The state that follows; None for the same.
        when: What must hold. Of several rules the first that holds counts.
        do: What happens. Raises before it changes anything, or not at all.
        sets: Attributes that the session has then.
    """

    states: tuple[State, ...]
    on: type[Message] | str
    then: State | None = None
    when: When | None = None
    do: Callable[..., None] | None = None
    sets: Mapping[str, object] = field(default_factory=dict)


Table = dict[State, dict[object, tuple[Rule[State], ...]]]


def by_state(rules: Iterable[Rule[State]]) -> Table[State]:
    """The rules of each state, by what comes. Each has one state, and one that follows."""
    table: Table[State] = {}
    for rule in rules:
        for state in rule.states:
            here = table.setdefault(state, {})
            then = state if rule.then is None else rule.then
            here[rule.on] = (*here.get(rule.on, ()), replace(rule, states=(state,), then=then))
    return table
