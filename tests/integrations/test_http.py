"""Calls to a server: what it answers, or a typed error that says what it said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from deltasync.errors import ConfigError, EngineFailed, PeerLost, TransportTimeout
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.integrations.vllm import HttpClient


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200, ANSWERS[self.path.split("/")[1]])

    def do_POST(self) -> None:
        seen.append(self.path)
        match self.path.split("?")[0]:
            case "/echo":
                self.answer(200, self.rfile.read(int(self.headers["Content-Length"])))
            case "/moved":
                self.answer(302, b"", Location="/echo")
            case "/fails":
                self.answer(500, b"the reason")
            case "/page":
                self.answer(200, b"<html>")
            case "/negative":
                self.answer(200, b"", **{"Transfer-Encoding": "chunked"})
                self.wfile.write(b"-5\r\nabc\r\n")
            case "/nested":
                self.answer(200, b"[" * 100_000)
            case "/slow":
                stop.wait(5)
            case "/refused":  # what is sent is not read, and the connection ends
                self.answer(401, b"no key")
            case "/taken":
                self.answer(200, b"")
            case "/cut":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nDate:")
            case path:
                self.answer(200, ANSWERS.get(path.split("/")[1], b""))

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


ANSWERS = {
    "object": b"{}",
    "list": b"[1]",
    "null": b"null",
    "nothing": b"",
    "types": b'{"dp_size": "1", "world_size": null, "results": 3, "success": {}}',
}
seen: list[str] = []
stop = threading.Event()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1, 0, "5", None])
def test_times_that_are_none_are_refused_at_once(timeout_s: Any) -> None:
    for make in (Http, HttpClient, SglangServer):
        with pytest.raises(ConfigError, match="timeout_s is"):
            make("http://127.0.0.1:9", timeout_s=timeout_s)


def test_answers_are_json_or_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a server is reached directly
    assert Http(url).post("echo", {"a": [1]}) == {"a": [1]}
    assert Http(url).post("empty", mode="keep", clear_cache=False) is None
    assert seen[-1] == "/empty?mode=keep&clear_cache=false"


def test_errors_say_what_the_server_said(url: str) -> None:
    with pytest.raises(EngineFailed, match=r"500 .*the reason") as caught:
        Http(url).post("fails")
    assert caught.value.status == 500
    with pytest.raises(EngineFailed, match="302"):  # a call that is sent elsewhere was not done
        Http(url).post("moved", {"a": 1})
    with pytest.raises(EngineFailed, match="JSON"):
        Http(url).post("page")
    with pytest.raises(EngineFailed, match="JSON"):
        Http(url).post("nested")
    with pytest.raises(PeerLost, match="negative"):
        Http(url).post("negative")
    with pytest.raises(TransportTimeout):
        Http(url, timeout_s=0.2).post("slow")


def test_a_server_that_refuses_before_it_has_read_the_call_is_heard(url: str) -> None:
    body = "a" * (20 << 20)
    with pytest.raises(EngineFailed, match=r"401 .*no key") as caught:
        Http(url, api_key="s3cr3t").post("refused", body)
    assert caught.value.status == 401
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(PeerLost):  # what says that it has done the call has not heard it
        Http(url).post("taken", body)


def test_an_answer_that_is_cut_is_none(url: str) -> None:
    with pytest.raises(PeerLost):
        Http(url).post("cut")


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_server_of_another_kind_is_refused(kind: str, url: str) -> None:
    client = HttpClient(f"{url}{kind}")
    with pytest.raises(ConfigError, match=r"no SGLang.*'dp_size'.*give the URL of"):
        SglangServer(f"{url}{kind}")
    calls: list[tuple[Callable[[], object], str]] = [
        (client.workers, "world_size"),
        (client.clear_cache, "success"),
        (lambda: client.collective_rpc("reach"), "results"),
    ]
    for call, said in calls:
        with pytest.raises(ConfigError, match=f"no vLLM.*'{said}'.*give the URL of"):
            call()


def test_servers_that_are_not_there() -> None:
    with pytest.raises(PeerLost):
        Http("http://127.0.0.1:9").get("health")
    with pytest.raises(ConfigError, match="give api_key") as caught:
        Http("http://user:s3cr3t@127.0.0.1:9")
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(ConfigError):
        Http("127.0.0.1:9")
    for url in ("http://[::1", "https://.a:1", "http://\udc80"):
        with pytest.raises(PeerLost):
            Http(url).get("health")
