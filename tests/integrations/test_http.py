"""Calls to a server: what it answers, in its time, or a typed error that says what it said."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deltasync.errors import ConfigError, DeltaSyncError, EngineFailed, PeerLost, TransportTimeout
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.integrations.vllm import AsyncClient, HttpClient
from deltasync.testing.links import PROMPT_S, within
from tests.worlds.links import until

Answer = Callable[[socket.socket], object]
BEATS = 200  # of 0.05 s: as long as a server drips that nobody hangs up on
HEADER = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = {"text": "x" * (32 << 20)}  # more than the buffers of a connection take


def says(body: bytes, status: str = "200 OK", more: str = "") -> Answer:
    head = f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return lambda line: line.sendall(head.encode() + body)


def drips(first: bytes, drop: bytes) -> Answer:
    """An answer whose rest comes drop by drop."""

    def answer(line: socket.socket) -> None:
        line.send(first)
        for _ in range(BEATS):
            line.send(drop)
            time.sleep(0.05)

    return answer


def reads_drop_by_drop(line: socket.socket) -> None:
    for _ in range(60):
        line.recv(1 << 16)
        time.sleep(0.05)


def heard(line: socket.socket) -> bytes:
    """A call, or the beginning of a long one."""
    data, missing = b"", 1
    while missing > 0 and (more := line.recv(1 << 16)):
        data += more
        head, end, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        missing = min(int(length[1]), 1 << 16) - len(body) if end and length else not end
    return data


def path_of(call: bytes) -> str:
    return call.split()[1].decode().partition("?")[0]


class Serves:
    """A server that does something with each connection, or what `by_path` says.

    Attributes:
        heard: What came on each.
    """

    def __init__(
        self, answer: Answer, context: ssl.SSLContext | None = None, *, reads: bool = True
    ) -> None:
        self.answer, self.heard = answer, list[bytes]()
        self.by_path: dict[str, Answer] = {}
        self._context, self._reads = context, reads
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Serves:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for thread in self._threads:
            thread.join()
        self._server.close()

    @property
    def url(self) -> str:
        host, port = self._server.getsockname()
        return f"http{'s' if self._context else ''}://{host}:{port}"

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._attend, args=(line,)))
            self._threads[-1].start()

    def _attend(self, line: socket.socket) -> None:
        try:
            if self._context is not None:
                line = self._context.wrap_socket(line, server_side=True)
            with line:
                if self._reads:
                    self.heard.append(heard(line))
                    self.by_path.get(path_of(self.heard[-1]), self.answer)(line)
                else:
                    self.answer(line)
        except OSError:
            pass


def test_answers_are_json_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a server is reached directly
    with Serves(says(b'{"a": [1]}')) as server:
        server.by_path["/empty"] = says(b"")
        assert Http(server.url).post("echo", {"a": [1]}) == {"a": [1]}
        assert server.heard[-1].endswith(b'{"a": [1]}')
        assert Http(f"{server.url}/").post("empty", mode="keep", clear_cache=False) is None
        assert server.heard[-1].startswith(b"POST /empty?mode=keep&clear_cache=false ")


CUT = [HEADER, HEADER + b"null", CHUNKED + b"4\r\nnull\r\n", b"HTTP/1.1 200 OK\r\nDate:"]


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (says(b"the reason", "500 No"), EngineFailed, r"500 .*the reason"),
        (says(b"", "302 Found", "Location: /echo\r\n"), EngineFailed, "302"),  # was not done
        (
            says(b"", "404 Not Found"),
            EngineFailed,
            "404 .*no engine server .*: give the URL of one$",
        ),
        (says(b"[" * 100_000), EngineFailed, "JSON"),
        (lambda line: line.send(CHUNKED + b"-5\r\nabc\r\n"), PeerLost, "negative"),
        *((lambda line, cut=cut: line.send(cut), PeerLost, "does not answer") for cut in CUT),
    ],
)
def test_errors_say_what_the_server_said_and_an_answer_that_is_cut_short_is_none(
    answer: Answer, error: type[Exception], said: str
) -> None:
    with Serves(answer) as server, pytest.raises(error, match=said) as caught:
        Http(server.url).post("update_weights_from_ipc", {})
    if isinstance(caught.value, EngineFailed) and "reason" in said:
        assert caught.value.status == 500


@pytest.mark.parametrize("body", [b"", b'{"dp_size": "1", "world_size": null, "results": 3}'])
def test_a_server_of_another_kind_is_refused(body: bytes) -> None:
    with Serves(says(body)) as server:
        client = HttpClient(server.url)
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: SglangServer(server.url), "no SGLang.*'dp_size'"),
            (client.workers, "no vLLM.*'world_size'"),
            (lambda: client.collective_rpc("reach"), "no vLLM.*'results'"),
        ]
        for call, said in calls:
            with pytest.raises(ConfigError, match=f"{said}.*give the URL of"):
                call()


def test_servers_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="give api_key") as caught:
        Http("http://user:s3cr3t@127.0.0.1:9")
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(ConfigError):
        Http("127.0.0.1:9")
    for url in ("http://127.0.0.1:9", "http://[::1", "https://.a:1", "http://\udc80"):
        with pytest.raises(PeerLost):
            Http(url).get("health")


SLOW = {
    "status": drips(b"HTTP/1.1 200 ", b"O"),
    "headers": drips(HEADER[:-2], b"X: 1\r\n"),
    "body": drips(HEADER, b"1"),
    "chunks": drips(CHUNKED, b"1\r\n1\r\n"),
    "reason of an error": drips(HEADER.replace(b"200 OK", b"500 No"), b"1"),
    "goes on": drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "reads": reads_drop_by_drop,
    "says nothing": lambda line: line.recv(1),
}


@pytest.mark.parametrize("what", SLOW)
def test_a_call_ends_in_its_time(what: str) -> None:
    with (
        within(PROMPT_S),
        Serves(SLOW[what], reads=what != "reads") as server,
        pytest.raises(TransportTimeout, match="did not answer in 0"),
    ):
        Http(server.url, timeout_s=0.5).post("pause", LARGE if what == "reads" else {})


def test_a_call_ends_in_its_time_though_no_address_of_the_host_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        where = deaf.getsockname()
        address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", where)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 200)
        with (
            socket.create_connection(where),  # no other one fits in
            within(PROMPT_S),
            pytest.raises(TransportTimeout, match="did not answer in 0"),
        ):
            Http(f"http://many:{where[1]}", timeout_s=0.5).get("health")


def secure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The context of a server that clients trust from now on."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    named = f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(f"{command} {named}".split(), check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def test_a_secure_server_is_called_in_its_time_and_a_strange_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as trusting:
        context = secure(tmp_path, trusting)
        with (
            Serves(SLOW["body"], context) as server,
            pytest.raises(TransportTimeout, match="did not answer in 2"),
        ):
            Http(server.url, timeout_s=2).post("pause", {})
        with Serves(says(b"true"), context) as server:
            assert Http(server.url).get("health") is True
            trusting.undo()
            with pytest.raises(PeerLost, match="certificate"):
                Http(server.url).get("health")


class Slow:
    """An `AsyncLLM` that answers nothing in time.

    Attributes:
        given_up: Calls that do not go on in vLLM.
    """

    def __init__(self) -> None:
        self.is_paused, self.given_up = False, list[str]()

    async def _hang(self, call: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.given_up.append(call)

    async def pause_generation(self, **_: object) -> None:
        self.is_paused = True
        await self._hang("pause")

    async def collective_rpc(self, method: str, **_: object) -> None:
        await self._hang(method)

    async def wake_up(self, tags: list[str]) -> None:
        self.is_paused = False


@pytest.mark.promise("Time", "Calls of an asynchronous vLLM are bounded.")
def test_calls_of_an_asynchronous_engine_are_bounded_and_its_pause_is_ended() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        engine = Slow()
        client = AsyncClient(engine, loop, timeout_s=0.2)
        with pytest.raises(TransportTimeout, match=r"vLLM did not answer in 0\.2 s"):
            client.collective_rpc("start")
        with pytest.raises(DeltaSyncError, match="did not answer"), client.paused():
            pass
        until(lambda: engine.given_up == ["start", "pause"])
        assert not engine.is_paused
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
