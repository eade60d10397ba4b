"""Interrupts at chosen places of the package, and worlds that must go on after them.

`python -m tests.sync.interrupts --seconds 1200 --opcodes` strikes for so long, and prints figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from traceback import format_exception
from types import CodeType, FrameType
from typing import Any, Protocol

import deltasync
from deltasync.errors import DeltaSyncError

_PACKAGE = str(Path(deltasync.__file__).parent)
_EXIT = ["LOAD_CONST"] * 3  # what `__exit__` is called with; PRECALL is of Python 3.11
_TURN = 20  # strikes of a world before the next one's
Place = tuple[CodeType, int]
"""Where an interrupt can come: a function, and a line of it, or an instruction."""


class Struck(KeyboardInterrupt):
    """What a signal handler raises."""


@dataclass(frozen=True, slots=True)
class Strike:
    """An interrupt at the `hit`-th time that the thread is at a place.

    `then` lines of the package later there is a second one; None for no second one. `kind` is
    raised.
    """

    place: Place
    hit: int = 1
    then: int | None = None
    kind: type[BaseException] = Struck

    def __str__(self) -> str:
        code, at = self.place
        where = f"{Path(code.co_filename).name}:{code.co_qualname}:{at}"
        return f"{self.kind.__name__} at {where}, visit {self.hit}, then {self.then}"


class Tracer:
    """Runs calls in this thread; notes the places that they come to, or strikes at one."""

    def __init__(self, *, opcodes: bool = False) -> None:
        self._opcodes = opcodes
        self._seen: dict[Place, bool] = {}
        self._is_ours: dict[CodeType, bool] = {}
        self._files = [contextlib.__file__] if opcodes else []
        self.hits: Counter[Place] = Counter()
        self._strike: Strike | None = None
        self._left = 0
        self.struck: list[Place] = []

    def places(self, call: Callable[[], object]) -> None:
        """Call, and let `hits` have how often it came to each place, in order."""
        self.hits = Counter()
        self._run(call, self._noting)

    def strike(self, call: Callable[[], object], strike: Strike) -> None:
        """Call, and be interrupted. Raises what the call raises."""
        self._strike, self._left, self.struck = strike, strike.hit, []
        self._run(call, self._striking)

    def _run(self, call: Callable[[], object], tracer: Any) -> None:
        sys.settrace(tracer)
        try:
            call()
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _ours(self, code: CodeType) -> bool:
        if code not in self._is_ours:
            named = code.co_filename
            self._is_ours[code] = named.startswith(_PACKAGE) or named in self._files
        return self._is_ours[code]

    def _place(self, frame: FrameType, event: str) -> Place | None:
        """Where this event is, if it is one of those that count."""
        if event != ("opcode" if self._opcodes else "line"):
            return None
        code, at = frame.f_code, frame.f_lasti
        if at in _leaving(code):
            return None
        return code, at if self._opcodes else frame.f_lineno

    def _noting(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            if not self._ours(frame.f_code):
                return None
            frame.f_trace_opcodes = self._opcodes
        elif (place := self._place(frame, event)) is not None:
            self.hits[place] += 1
        return self._noting

    def _striking(self, frame: FrameType, event: str, arg: object) -> Any:
        strike = self._strike
        assert strike is not None
        if event == "call":
            if frame.f_code is not strike.place[0]:
                return None
            frame.f_trace_opcodes = self._opcodes
        elif self._place(frame, event) == strike.place:
            self._left -= 1
            if not self._left:
                if strike.then is not None:
                    self._left = strike.then
                    sys.setprofile(self._rearm)  # an exception that a tracer raises ends tracing
                self._hit(strike.place)
        return self._striking

    def _hit(self, place: Place) -> None:
        assert self._strike is not None
        self.struck.append(place)
        raise self._strike.kind("planted")

    def _rearm(self, frame: FrameType, event: str, arg: object) -> None:
        sys.setprofile(None)
        sys.settrace(self._again)
        above: FrameType | None = frame
        while above is not None:
            if self._ours(above.f_code):
                above.f_trace = self._again
            above = above.f_back

    def _again(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            return self._again if self._ours(frame.f_code) else None
        if event == "line" and frame.f_lasti not in _leaving(frame.f_code):
            self._left -= 1
            if not self._left:
                self._hit((frame.f_code, frame.f_lineno))
        return self._again


@cache
def _leaving(code: CodeType) -> frozenset[int]:
    """Where a function leaves a `with`: CPython looks for signals there only after `__exit__`."""
    found, instructions = set[int](), list(dis.get_instructions(code))
    for at, one in enumerate(instructions):
        rest = instructions[at : at + 5]
        if one.opname == "PUSH_EXC_INFO" and "WITH_EXCEPT_START" in [i.opname for i in rest]:
            found.update(i.offset for i in rest)
        names = [i.opname for i in rest if i.argval is None or i.opname != "LOAD_CONST"]
        if names[:4] == [*_EXIT, "CALL"] or names == [*_EXIT, "PRECALL", "CALL"]:
            found.update(i.offset for i in rest[: names.index("CALL") + 1])
            while at and instructions[at - 1].opname in ("SWAP", "NOP", "COPY"):  # `return`
                at -= 1
                found.add(instructions[at].offset)
    return frozenset(found)


class World(Protocol):
    """Both ends of something, settled between two calls.

    `prepare` makes ready what `act` then does in this thread; `calm` syncs without interrupts, and
    raises unless that succeeds and all are equal.
    """

    def prepare(self) -> None: ...

    def act(self) -> object: ...

    def calm(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Figures:
    """What was done."""

    interrupts: int = 0
    second: int = 0
    calm_syncs: int = 0
    places: set[Place] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.interrupts} interrupts at {len(self.places)} places, {self.second} of them "
            f"within another one, {self.calm_syncs} calm syncs, {len(self.failures)} failures"
        )


def places_of(make: Callable[[], World], tracer: Tracer) -> Counter[Place]:
    """How often `act` of a world comes to each place."""
    with contextlib.closing(make()) as world:
        world.prepare()
        with contextlib.suppress(DeltaSyncError):
            tracer.places(world.act)
        return tracer.hits


def endure(
    make: Callable[[], World], tracer: Tracer, strikes: Iterable[Strike], figures: Figures
) -> None:
    """Let each strike hit a world, which must go on. What does not is noted, and made anew."""
    world = make()
    for strike in strikes:
        try:
            _endure_one(world, tracer, strike, figures)
        except BaseException as error:
            if not isinstance(error, Exception | Struck):
                raise
            struck = [f"{Path(c.co_filename).name}:{c.co_qualname}:{at}" for c, at in tracer.struck]
            why = "".join(format_exception(error)[-4:])
            figures.failures.append(f"{strike}; struck {struck}; {why}")
            with contextlib.suppress(Exception):
                world.close()
            world = make()
    with contextlib.suppress(AssertionError):
        world.close()


def _endure_one(world: World, tracer: Tracer, strike: Strike, figures: Figures) -> None:
    world.prepare()
    with contextlib.suppress(strike.kind, DeltaSyncError):
        tracer.strike(world.act, strike)
    figures.interrupts += len(tracer.struck)
    figures.second += len(tracer.struck) > 1
    figures.places.update(tracer.struck)
    for _ in range(2):
        world.calm()
        figures.calm_syncs += 1


def strikes_at(places: Counter[Place], *, seed: int) -> list[Strike]:
    """One for each place, at any of its visits, some with a second one, in any order."""
    chance = random.Random(seed)
    found = [
        Strike(
            place,
            hit=chance.choice([1, 1, chance.randint(1, visits)]),
            then=chance.choice([None, chance.randint(1, 60)]),
        )
        for place, visits in places.items()
    ]
    chance.shuffle(found)
    return found


def main() -> None:
    """Strike all worlds in turn, at each place once a round, until the time is over."""
    from tests.sync.interrupted import WORLDS

    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=60.0)
    asked.add_argument("--opcodes", action="store_true", help="strike at instructions, not lines")
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    logging.disable(logging.CRITICAL)
    tracer, figures = Tracer(opcodes=given.opcodes), Figures()
    due = {name: list[Strike]() for name in WORLDS}
    end, seed = time.monotonic() + given.seconds, given.seed
    for name, make in cycle(WORLDS.items()):
        if time.monotonic() > end:
            break
        if not due[name]:
            due[name], seed = strikes_at(places_of(make, tracer), seed=seed), seed + 1
        known, now, due[name] = len(figures.failures), due[name][:_TURN], due[name][_TURN:]
        endure(make, tracer, (s for s in now if time.monotonic() < end), figures)
        said = [f"{name}: {figures}", *figures.failures[known:]]
        sys.stdout.write("\n    ".join(said) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{given.seconds:.0f} s: {figures}\n")
    sys.exit(bool(figures.failures))


if __name__ == "__main__":
    main()
