"""An engine that did what it was asked, and whose answer was lost: nobody is left paused for it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deltasync import ModuleSource
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.integrations import engine as engine_module
from deltasync.integrations import http, sglang, vllm
from deltasync.integrations.engine import Pause
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.vllm import HttpClient
from deltasync.transports import shared_memory
from tests.integrations.served import LOST, Engine, served
from tests.worlds.fleets import SHAPES, Server, fleet_of, model, outcome
from tests.worlds.links import Model, bits_equal, until

CALLS = ["connect", "pause_generation", "write", "name", "continue_generation"]
Way = EngineSync | EngineFleet


@contextmanager
def trainer(
    kind: type[Way], engine: Engine, folder: Path, timeout_s: float = 20.0
) -> Iterator[tuple[Way, Model]]:
    """A trainer whose engine holds its first version."""
    source, link = model(0), shared_memory.Sender(folder / "socket")
    server = engine.client(timeout_s)
    with ExitStack() as stack:
        if kind is EngineSync:
            sync: Way = EngineSync(
                ModuleSource(source), server, link, paused=server.paused, timeout_s=3.0
            )
        else:
            sync = EngineFleet(ModuleSource(source), link, timeout_s=3.0)
            sync.add(server, workers=1, paused=server.paused, name="engine")
        stack.enter_context(sync)
        sync.send_weights()
        yield sync, source


def step(source: Model) -> None:
    for weights in source.parameters():
        weights.data[0] *= -2


@pytest.mark.parametrize(
    ("call", "lost"), [*((CALLS[1], lost) for lost in LOST), *((call, "cut") for call in CALLS)]
)
@pytest.mark.parametrize("kind", [EngineSync, EngineFleet])
def test_an_engine_whose_answer_was_lost_is_resumed_by_the_close(
    kind: type[Way], call: str, lost: str, tmp_path: Path
) -> None:
    timeout_s = 2.0 if lost == "silence" else 20.0
    with (
        served(Engine(model(1))) as engine,
        trainer(kind, engine, tmp_path, timeout_s) as (sync, source),
    ):
        step(source)
        engine.loses[call] = lost
        if call == "connect":
            sync.disconnect()
        outcome(sync.send_weights)
        engine.goes_on.set()
        if isinstance(sync, EngineFleet) and engine.is_paused:
            assert sync.servers()["engine"].is_paused
        engine.loses.clear()
        sync.close()
        until(lambda: not engine.is_paused)
        if isinstance(sync, EngineFleet):
            assert not sync.servers()["engine"].is_paused


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [EngineSync, EngineFleet])
def test_an_engine_whose_answer_was_lost_is_right_after_the_next_calls(
    kind: type[Way], call: str, tmp_path: Path
) -> None:
    with served(Engine(model(1))) as engine, trainer(kind, engine, tmp_path) as (sync, source):
        step(source)
        engine.loses[call] = "cut"
        if call == "connect":
            sync.disconnect()
        outcome(sync.send_weights)
        engine.loses.clear()
        until(lambda: holds(sync, source, engine), timeout_s=60.0)
        assert not engine.is_paused
        assert engine.version == str(sync.sender.version)


def holds(sync: Way, source: Model, engine: Engine) -> bool:
    step(source)
    stats = outcome(sync.send_weights)
    is_taken = not isinstance(stats, DeltaSyncError) and not stats.lost
    return is_taken and bits_equal(source, engine.module)


@pytest.mark.parametrize("kind", [EngineSync, EngineFleet])
def test_an_engine_that_pauses_and_does_not_resume_counts_as_paused_until_it_does(
    kind: type[Way], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answers are lost, and then it fails to resume: in the call, and in `close` too."""
    with served(Engine(model(1))) as engine, trainer(kind, engine, tmp_path) as (sync, source):
        step(source)
        engine.loses["pause_generation"] = "cut"
        engine.fails.add("continue_generation")
        outcome(sync.send_weights)
        assert engine.is_paused
        for _ in range(2):
            if isinstance(sync, EngineFleet):
                assert sync.servers()["engine"].is_paused
            sync.close()
        assert engine.is_paused
        said = [one.message for one in caplog.records if one.levelno == logging.ERROR]
        assert len(said) == 1
        assert "cannot be resumed" in said[0]


def test_a_removed_server_whose_answer_was_lost_is_resumed(tmp_path: Path) -> None:
    with (
        served(Engine(model(1))) as engine,
        trainer(EngineFleet, engine, tmp_path) as (fleet, source),
    ):
        assert isinstance(fleet, EngineFleet)
        step(source)
        engine.loses["pause_generation"] = "cut"
        engine.fails.add("continue_generation")
        outcome(fleet.send_weights)
        assert engine.is_paused
        engine.fails.clear()
        engine.loses.clear()
        fleet.remove("engine")
        until(lambda: not engine.is_paused)


def test_any_context_manager_whose_pause_fails_late_is_resumed(tmp_path: Path) -> None:
    """Users write their own, which pause first and may raise after that."""
    with fleet_of(tmp_path, 1) as here:
        odd, fails = Server(model(9)), threading.Event()

        @contextmanager
        def paused() -> Iterator[None]:
            odd.is_paused = True
            if fails.is_set():
                raise ConnectionError("the answer was lost")
            yield
            odd.is_paused = False

        here.fleet.add(odd, paused=paused, name="odd")
        here.servers["odd"] = odd
        here.send()
        here.step()
        fails.set()
        assert list(here.send().lost) == ["odd"]
        assert odd.is_paused
        assert here.fleet.servers()["odd"].is_paused
        fails.clear()
        here.fleet.close()
        assert not odd.is_paused
        assert not here.fleet.servers()["odd"].is_paused


@pytest.mark.parametrize("kind", [EngineSync, EngineFleet])
def test_an_engine_that_is_asleep_and_whose_answer_was_lost_generates_when_it_is_awake(
    kind: type[Way], tmp_path: Path
) -> None:
    with served(Engine(model(1))) as engine, trainer(kind, engine, tmp_path) as (sync, source):
        engine.worker.sleep()
        step(source)
        for call in ("pause_generation", "write"):
            engine.loses[call] = "cut"
            with pytest.raises(ConfigError, match="the engine's weights sleep"):
                sync.send_weights()
            until(lambda: not engine.is_paused)
            engine.loses.clear()
        engine.worker.wake()
        until(lambda: holds(sync, source, engine), timeout_s=60.0)
        assert not engine.is_paused


class Paths:
    """Follows the pauses of a server of vLLM's or SGLang's; answers as both do."""

    def __init__(self) -> None:
        self.is_paused = False

    def post(self, path: str, body: object = None, **_: object) -> dict[str, object]:
        if path in ("pause", "pause_generation"):
            self.is_paused = True
        if path in ("wake_up", "continue_generation"):
            self.is_paused = False
        return {}


@pytest.mark.parametrize("is_sglang", [True, False])
def test_an_interrupt_at_any_line_of_a_pause_leaves_nothing_paused_unknown(
    is_sglang: bool,
) -> None:
    """`with client.paused()` ends resumed; a `Pause` knows until it has resumed."""
    with served(Engine(model(0, SHAPES))) as engine:
        client: Any = engine.client() if is_sglang else HttpClient(engine.url)
        paths = client._http = Paths()
        for where in lines_of(lambda: held(client)):
            with suppress(KeyboardInterrupt):
                struck(where, lambda: held(client))
            assert not paths.is_paused or where[1] in ("post", "paused"), where
            paths.is_paused = False
        for where in lines_of(lambda: taken(Pause(client.paused))):
            pause = Pause(client.paused)
            with suppress(KeyboardInterrupt):
                struck(where, lambda pause=pause: taken(pause))  # type: ignore[misc]
            assert pause.is_on or not paths.is_paused, where
            pause.end()
            assert not paths.is_paused, where
            assert not pause.is_on


def held(client: Any) -> None:
    with client.paused():
        pass


def taken(pause: Pause) -> None:
    pause.begin()
    pause.renew()
    pause.end()


FILES = {engine_module.__file__, http.__file__, sglang.__file__, vllm.__file__, __file__}
Where = tuple[str, str, int, int]


def lines_of(call: Callable[[], object]) -> list[Where]:
    """Each line that a call runs in these files, and how often it had run before."""
    seen: list[Where] = []
    trace(call, lambda where: seen.append(where))
    return seen


def struck(where: Where, call: Callable[[], object]) -> None:
    """Make a call, with a KeyboardInterrupt at a line."""

    def strike(now: Where) -> None:
        if now == where:
            raise KeyboardInterrupt

    trace(call, strike)


def trace(call: Callable[[], object], note: Callable[[Where], object]) -> None:
    counts: dict[tuple[str, str, int], int] = {}

    def follow(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_filename not in FILES or frame.f_code.co_name == "strike":
            return None
        if event == "line":
            at = code.co_filename, code.co_name, frame.f_lineno
            counts[at] = counts.get(at, 0) + 1
            note((*at, counts[at]))
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)


def test_an_engine_without_pauses_is_closed_without_a_wait(tmp_path: Path) -> None:
    with served(Engine(model(1))) as engine:
        link = shared_memory.Sender(tmp_path / "socket")
        with EngineSync(
            ModuleSource(model(0)), engine.client(), link, paused=nullcontext, timeout_s=60.0
        ) as sync:
            sync.send_weights()
        assert "pause_generation" not in engine.calls
