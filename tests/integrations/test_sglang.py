"""SGLang's workers answer what is wrong with an order; none of it ends the server."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations import checkpoint_engine
from deltasync.integrations.sglang import NOT_YET, Extension, SglangServer, worker_of
from deltasync.integrations.sglang_scheduler import _AROUND
from deltasync.integrations.trainer_info import TrainerInfo, WorkerRequest
from deltasync.transports.address import Address
from tests.integrations.test_http import Serves, says
from tests.worlds.fleets import Server, engine_of, model
from tests.worlds.links import Model

IPC = "/update_weights_from_ipc"
TO = TrainerInfo(
    addresses=(Address(link="shared_memory"),),
    engine="engine",
    tensors=(),
    max_staged_bytes=1,
    timeout_s=1,
)


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Those of SGLang's server that a worker looks at."""
    context, arguments = ModuleType("sglang.srt.runtime_context"), SimpleNamespace()
    arguments.checkpoint_engine_wait_weights_before_ready = False
    vars(context)["get_server_args"] = lambda: arguments
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
    return arguments


def give(handles: dict[str, str], *, is_draft_worker: bool = False) -> None:
    runner = SimpleNamespace(model=nn.Linear(2, 2), is_draft_worker=is_draft_worker)
    Extension(runner).update_weights_from_ipc(handles)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "deltasync: ValidationError"),
        ('{"version": 7}', "deltasync: ConfigError: no trainer is connected"),
        ('{"trainer": {"addresses": [{"link": "pigeon"}]}}', "pigeon"),
    ],
)
def test_orders_that_make_no_sense_are_answered(text: str, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        give({"deltasync": text})
    give({"deltasync": text}, is_draft_worker=True)  # which keeps its weights


def test_a_checkpoint_of_a_parameter_server_that_was_not_loaded_is_told() -> None:
    """Which does not read the answer to its last bucket."""

    def load(weights: object) -> None:
        raise ValueError("planted")

    def update(extension: Any, handles: dict[str, str]) -> None:
        with suppress(ValueError):
            extension.get_model_loader()(handles["GPU-1"])

    runner = SimpleNamespace(model=nn.Linear(2, 2), is_draft_worker=False)
    extension = SimpleNamespace(model_runner=runner, get_model_loader=lambda: load)
    assert worker_of(runner.model).knows_copy
    with pytest.raises(EngineFailed, match="a bucket was not loaded: planted"):
        checkpoint_engine._update(update, extension, {"GPU-1": "weights"})
    assert not worker_of(runner.model).knows_copy


class Ours(Server):
    """A server of one worker, which is not SGLang's: it has no loader to watch."""

    def connect(self, connection: dict[str, Any], /) -> None:
        asked = WorkerRequest(trainer=TrainerInfo.model_validate(connection))
        give({"deltasync": asked.model_dump_json()})


def test_a_worker_that_cannot_reload_tells_the_trainer(tmp_path: Path) -> None:
    with (
        engine_of(tmp_path, kind=Ours, without_routes="reload") as here,
        pytest.raises(ConfigError, match=r"SGLang.* without_routes=\"reload\""),
    ):
        here.send()


def answering(**more: object) -> Serves:
    """SGLang, with this information about the server."""
    info = {"success": True, "dp_size": 1, "tp_size": 2, "pp_size": 1} | more
    return Serves(says(json.dumps(info).encode()))


def asked(server: Serves) -> list[tuple[str, int | None, str | None, bool]]:
    """Of each order its path, its version, the version's name, and whether caches are cleared."""
    found = []
    for one in server.heard:
        head, _, text = one.partition(b"\r\n\r\n")
        if head.startswith(b"POST"):
            body = json.loads(text)
            order = json.loads(body["zmq_handles"]["deltasync"])
            named, clears = body["weight_version"], body["flush_cache"]
            found.append((head.split()[1].decode(), order["version"], named, clears))
    return found


def test_orders_take_the_way_of_a_parameter_servers_sockets_and_clear_what_is_stale() -> None:
    with answering() as http:
        server = SglangServer(http.url)
        assert server.workers == 2
        server.update(1, "me")
        server.name(1, "me")
        http.by_path[IPC] = says(b'{"message": "planted"}', "400 No")
        with pytest.raises(EngineFailed, match="planted"):
            server.update(2, "me")
        http.by_path.clear()
        server.name(2, "me")  # which clears what the update did not
        server.connect(TO.model_dump())
        server.name(2, "me")  # what an earlier trainer may not have cleared
        http.by_path[IPC] = says(json.dumps({"message": NOT_YET}).encode(), "400 No")
        server.disconnect("me")  # is done, though the answer is that no weights have come
        keeps = SglangServer(http.url, caches="keep")
        http.by_path.clear()
        keeps.update(3, "me")
        keeps.name(3, "me")
        assert asked(http) == [
            (IPC, 1, None, True),
            (IPC, 1, "1", False),
            (IPC, 2, None, True),
            (IPC, 2, "2", True),
            (IPC, None, None, False),
            (IPC, 2, "2", True),
            (IPC, None, None, False),
            (IPC, 3, None, False),
            (IPC, 3, "3", False),
        ]


CACHES = r'caches is .* SGLang takes "clear" or "keep"'


@pytest.mark.parametrize(
    ("info", "caches", "said"),
    [
        ({}, "version", CACHES),  # not taken for those that are kept
        ({"dp_size": 2}, "keep", "several data-parallel replicas"),
        ({"hicache_storage_backend": "file"}, "clear", r"\(hicache_.*\).* or say caches=.keep."),
        ({"enable_lmcache": True}, "clear", r"\(enable_lmcache\).* or say caches=.keep."),
    ],
)
def test_caches_that_no_update_would_clear_are_refused(
    info: dict[str, object], caches: Any, said: str
) -> None:
    with answering(**info) as http:
        with pytest.raises(ConfigError, match=said):
            SglangServer(http.url, caches=caches)
        if caches == "clear":
            SglangServer(http.url, caches="keep")


def test_pipeline_stages_are_not_paused_but_by_ending_requests() -> None:
    """SGLang's loop for them goes on."""
    with answering(pp_size=3) as http:
        server = SglangServer(http.url)
        assert server.workers == 6
        with pytest.raises(ConfigError, match="retract"), server.paused():
            pass
        with server.paused("abort"):
            pass


class Sleeper(Server):
    """A server of one worker whose memory SGLang releases, and keeps what weights hold or not."""

    kept = True

    def __init__(self, module: Model) -> None:
        super().__init__(module)
        self.workers = [worker_of(module)]

    def ask(self, name: str, tags: list[str] | None) -> None:
        """Of SGLang's manager of weights."""
        runner = SimpleNamespace(model=self.module)
        manager = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner),
            memory_saver_adapter=SimpleNamespace(enabled=True),
        )
        _AROUND[name](self._touch, manager, SimpleNamespace(tags=tags))

    def _touch(self, *_: object) -> None:
        if not self.kept:
            self.module.get_parameter("a").data.fill_(7)


@pytest.mark.parametrize("kept", [True, False])
def test_weights_that_sglang_keeps_take_the_next_delta_and_others_are_sent(
    kept: bool, tmp_path: Path, arguments: SimpleNamespace
) -> None:
    arguments.enable_weights_cpu_backup = kept
    server = Sleeper(model(1))
    server.kept = kept
    with engine_of(tmp_path, server=server) as here:
        here.send()
        for _ in range(2):
            server.ask("release_memory_occupation", None)
            for awake in (["kv_cache"], ["weights"]):
                with pytest.raises(ConfigError, match="sleep"):
                    here.send()
                server.ask("resume_memory_occupation", awake)
            stats = here.train()
            assert (stats.receivers, stats.full_synced) == (1, 0 if kept else 1)
            here.check()
