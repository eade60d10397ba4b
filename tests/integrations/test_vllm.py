"""The trainer's side of vLLM's interface, against workers that are driven as vLLM drives them."""

from __future__ import annotations

import sys
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deltasync.errors import ConfigError, DeltaSyncError, EngineFailed
from deltasync.integrations.trainer_info import Work
from deltasync.integrations.vllm import VllmServer
from deltasync.integrations.vllm_core import (
    CLEAR,
    TRY,
    UPDATE,
    _taking_updates,
    update,
    write,
)
from tests.worlds.fleets import Server, engine_of, outcome
from tests.worlds.links import Model
from tests.worlds.programs import run

NAME = ["clear", "start", "update", "finish"]
WRITE = ["start", "update", "finish", *NAME]


class Vllm(Server):
    """One worker, and vLLM's calls that reach it."""

    def __init__(self, module: Model) -> None:
        super().__init__(module)
        self.is_updating = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if "trainer" in init_info:
            self.connect(init_info["trainer"])
        else:
            self.disconnect(init_info["holder"])

    def start_weight_update(self) -> None:
        self.at("start")
        assert not self.is_updating
        self.is_updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.at("update")
        self.commit(**update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.at("finish")
        if not self.is_updating:
            raise RuntimeError("none is under way")
        self.is_updating = False
        self.version = int(weight_version or self.version)

    def clear_cache(self) -> None:
        assert not self.is_updating
        self.at("clear")


syncing = partial(engine_of, kind=Vllm, through=VllmServer, timeout_s=2.0)


@pytest.mark.parametrize(
    ("fails", "asked"),
    [
        ("start", ["start", "finish"]),
        ("update", ["start", "update", "finish"]),
        ("finish", ["start", "update", "finish", "finish"]),
        ("clear", ["start", "update", "finish", "clear"]),
    ],
)
def test_an_update_that_is_not_made_is_told_and_made_up_for(
    fails: str, asked: list[str], tmp_path: Path
) -> None:
    with syncing(tmp_path) as here:
        here.send(timeout_s=60)
        server = here.servers["0"]
        held = server.module.get_parameter("a").clone()
        server.calls.clear()
        server.fails = fails
        error = outcome(here.train)
        assert isinstance(error, DeltaSyncError)
        assert "planted" in f"{error} {getattr(error, '__notes__', '')}"
        assert (server.calls, server.version) == (asked, 1)
        is_written = fails in ("finish", "clear")
        assert torch.equal(held, server.module.get_parameter("a")) != is_written
        server.calls.clear()
        here.send(timeout_s=60)
        here.check()
        assert server.calls[:5] == ["connect", *(NAME if is_written else WRITE[:4])]


def test_what_clears_no_caches_is_refused() -> None:
    """As a client of vLLM's own."""
    client = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"has no clear_cache.* or say caches=.keep."):
        VllmServer(client)
    with pytest.raises(ConfigError, match="caches is 'drop', which is none of clear, keep"):
        VllmServer(client, caches="drop")  # type: ignore[arg-type]
    VllmServer(client, caches="keep")


def test_an_update_in_one_call_clears_what_may_be_stale() -> None:
    class Client(SimpleNamespace):
        def collective_rpc(self, method: str, *what: object) -> list[str]:
            if method == UPDATE:
                self.clears.append(what[2])
            return [self.error]

    client = Client(clears=[], error="")
    server, keeping = VllmServer(client), VllmServer(client, caches="keep")
    server.connect({})
    server.switch(1, "pass", False, "me")  # what an earlier trainer may not have cleared
    server.switch(2, "pass", False, "me")
    client.error = "planted"
    with pytest.raises(EngineFailed, match="planted"):
        server.switch(3, "write", False, "me")
    client.error = ""
    server.switch(3, "name", False, "me")
    server.switch(4, "write", False, "me")
    keeping.switch(5, "write", False, "me")
    assert client.clears == [True, False, True, True, True, False]


@pytest.mark.parametrize("work", ["write", "pass", "name"])
def test_a_core_waits_for_its_steps_only_if_weights_change(
    monkeypatch: pytest.MonkeyPatch, work: Work
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: seen.append("waits"))
    worker = SimpleNamespace(
        start_weight_update=lambda: None,
        update_weights=seen.append,
        finish_weight_update=lambda: None,
    )
    assert write(worker, 7, work, "me") == ""
    asked = {"version": 7, "work": work, "holder": "me"}
    assert seen == ["waits"] * (work == "write") + [asked]


class State(Enum):
    UNPAUSED = 0
    PAUSED_ALL = 1


class Core:
    """Stands for vLLM's engine core, without steps in flight."""

    batch_queue = None
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            is_multimodal_model=False, is_encoder_decoder=False, runner_type="generate"
        )
    )

    def __init__(self, state: State) -> None:
        self.scheduler = SimpleNamespace(pause_state=state)
        self.scheduler.set_pause_state = lambda to: vars(self.scheduler).update(pause_state=to)
        self.model_executor = SimpleNamespace(collective_rpc=self._write)
        self.error, self.calls = "", list[str]()

    def _write(self, *_: object, **__: object) -> list[str]:
        self.calls.append(self.scheduler.pause_state.name)
        return [self.error]

    def reset_prefix_cache(self, *_: object) -> bool:
        self.calls.append("clear")
        return True

    def set_weight_version(self, version: str) -> None:
        self.calls.append(version)

    def wake_up(self, _: object) -> None:
        self.scheduler.set_pause_state(State.UNPAUSED)


@pytest.mark.parametrize("before", State)
def test_a_core_that_is_anothers_is_left_as_it_was(
    before: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = ModuleType("vllm.v1.core.sched.interface")
    vars(interface)["PauseState"] = State
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    core = Core(before)
    core.error = "EngineTaken: another trainer has it; or take_over=True"
    with pytest.raises(EngineFailed, match="EngineTaken"):
        update(core, 2, "write", False, True, "me")
    assert (core.scheduler.pause_state, core.calls) == (before, ["PAUSED_ALL"])


def test_a_core_takes_the_calls_of_an_update_and_names_what_is_finished() -> None:
    """It hears of each worker that fails, and of caches that are not dropped."""
    core, heard, errors = Core(State.UNPAUSED), list[object](), ["", ""]
    backend = SimpleNamespace(backend="deltasync")
    core.vllm_config = SimpleNamespace(**vars(Core.vllm_config), weight_transfer_config=backend)

    def collective_rpc(_: Core, *what: object) -> list[str]:
        heard.append(what)
        return errors

    call = _taking_updates(collective_rpc)
    assert call(core, "finish_weight_update", args=("7",)) == [None, None]
    assert call(core, CLEAR) == [None]
    assert core.calls == ["7", "clear"]
    errors[1] = "planted"
    with pytest.raises(EngineFailed, match="planted"):
        call(core, "finish_weight_update", args=("8",))
    core.reset_prefix_cache = lambda *_: False  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="has not dropped its cached prefixes"):
        call(core, CLEAR)
    assert core.calls == ["7", "clear"]
    assert heard == [(TRY, None, ("finish_weight_update", (), {}))] * 2


_IMPORT = """
import sys
sys.path.insert(0, {path!r})
from deltasync.errors import ConfigError
try:
    import deltasync.integrations.vllm_trainer
except ConfigError as error:
    print(error)
"""


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A vLLM without the trainer's half that is needed is a `ConfigError` that says which one is.",
)
def test_which_vllm_is_needed_is_in_the_error(tmp_path: Path) -> None:
    """Where one is installed whose trainers take a configuration."""
    package = tmp_path / "vllm" / "distributed" / "weight_transfer"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent):
        (folder / "__init__.py").touch()
    names = "HTTPVLLMWeightSyncClient = WeightTransferTrainerFactory = None"
    (package / "__init__.py").write_text(names, encoding="utf-8")
    classes = "class TrainerInitInfo:\n    rank: int\nclass TrainerWeightTransferEngine: ..."
    (package / "base.py").write_text(classes, encoding="utf-8")
    printed = run(_IMPORT.format(path=str(tmp_path))).stdout
    assert "no vLLM here whose trainer's half is known" in printed
    assert "use vLLM 0.32 or newer" in printed
