"""Servers that take their time with each byte: a call ends when its time is over."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deltasync.errors import DeltaSyncError, PeerLost, TransportTimeout
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.integrations.vllm import AsyncClient, HttpClient
from deltasync.transports import forks

BEATS = 200  # of 0.05 s: as long as a server drips that nobody hangs up on
HEADER = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n"


def drip(line: socket.socket, beat: Callable[[], object]) -> None:
    for _ in range(BEATS):
        beat()
        time.sleep(0.05)


def drips_its_status(line: socket.socket) -> None:
    parts = iter(b"HTTP/1.1 200 " + b"O" * BEATS)
    drip(line, lambda: line.send(bytes([next(parts)])))


def drips_its_headers(line: socket.socket) -> None:
    line.send(HEADER[:-2])
    drip(line, lambda: line.send(b"X: 1\r\n"))


def drips_its_body(line: socket.socket) -> None:
    line.send(HEADER)
    drip(line, lambda: line.send(b"1"))


def drips_chunks(line: socket.socket) -> None:
    line.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    drip(line, lambda: line.send(b"1\r\n1\r\n"))


def drips_the_reason_of_an_error(line: socket.socket) -> None:
    line.send(HEADER.replace(b"200 OK", b"500 No"))
    drip(line, lambda: line.send(b"1"))


def reads_drop_by_drop(line: socket.socket) -> None:
    drip(line, lambda: line.recv(1 << 16))


def goes_on(line: socket.socket) -> None:
    line.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    drip(line, lambda: line.send(b"HTTP/1.1 100 Continue\r\n\r\n"))


def cuts_its_answer_short(line: socket.socket) -> None:
    line.send(HEADER)


def cuts_its_answer_after_a_word(line: socket.socket) -> None:
    line.send(HEADER + b"null")


def cuts_its_answer_in_chunks_short(line: socket.socket) -> None:
    line.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nnull\r\n")


@contextmanager
def served(
    answer: Callable[[socket.socket], None], wrap: Callable[[socket.socket], socket.socket]
) -> Iterator[str]:
    """The host and port of a server that does this with each connection."""
    server = socket.create_server(("127.0.0.1", 0))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    threads: list[threading.Thread] = []

    def serve() -> None:
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=attend, args=(line,)))
            threads[-1].start()

    def attend(line: socket.socket) -> None:
        try:
            with wrap(line) as wrapped:
                if answer is not reads_drop_by_drop:
                    wrapped.recv(1 << 16)
                answer(wrapped)
        except OSError:
            pass

    accepting = threading.Thread(target=serve)
    accepting.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join()
        server.close()


def plain(line: socket.socket) -> socket.socket:
    return line


SLOW = [
    drips_its_status,
    drips_its_headers,
    drips_its_body,
    drips_chunks,
    drips_the_reason_of_an_error,
    reads_drop_by_drop,
    goes_on,
]
LARGE = {"text": "x" * (64 << 20)}  # more than the buffers of a connection take


@pytest.mark.parametrize("answer", SLOW)
def test_a_call_ends_in_its_time(answer: Callable[[socket.socket], None]) -> None:
    with served(answer, plain) as address:
        body = LARGE if answer is reads_drop_by_drop else {}
        with pytest.raises(TransportTimeout, match="did not answer in 0"):
            Http(f"http://{address}", timeout_s=0.5).post("pause", body)


@pytest.mark.parametrize("answer", [drips_its_body, reads_drop_by_drop])
def test_a_secure_call_ends_in_its_time(
    answer: Callable[[socket.socket], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = secure(tmp_path, monkeypatch)
    with served(answer, lambda line: context.wrap_socket(line, server_side=True)) as address:
        body = LARGE if answer is reads_drop_by_drop else {}
        with pytest.raises(TransportTimeout, match="did not answer in 2"):
            Http(f"https://{address}", timeout_s=2).post("pause", body)


def test_a_secure_server_is_called_and_a_strange_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(line: socket.socket) -> None:
        line.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ntrue")

    with monkeypatch.context() as trusting:
        context = secure(tmp_path, trusting)
        with served(answer, lambda line: context.wrap_socket(line, server_side=True)) as address:
            assert Http(f"https://{address}").get("health") is True
            trusting.undo()
            with pytest.raises(PeerLost, match="certificate"):
                Http(f"https://{address}").get("health")


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


@pytest.mark.parametrize(
    "answer",
    [cuts_its_answer_short, cuts_its_answer_after_a_word, cuts_its_answer_in_chunks_short],
)
def test_an_answer_that_is_cut_short_is_none(answer: Callable[[socket.socket], None]) -> None:
    with served(answer, plain) as address, pytest.raises(PeerLost):
        Http(f"http://{address}").post("update_weights_from_ipc", {})


@pytest.mark.parametrize("make", [HttpClient, SglangServer])
def test_clients_of_engines_end_their_calls_in_time(
    make: Callable[..., HttpClient | SglangServer],
) -> None:
    with served(drips_its_body, plain) as address, pytest.raises(TransportTimeout):
        pause(make(f"http://{address}", timeout_s=0.5))


def pause(client: HttpClient | SglangServer) -> None:
    with client.paused():
        pass


def test_all_addresses_of_a_host_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them lets anybody in: their queues are full."""
    with ExitStack() as stack:
        full = [stack.enter_context(full_server()) for _ in range(4)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", where) for where in full]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        waited: list[float] = []
        dialled = forks.new_socket

        here = threading.get_ident()

        def new_socket(*kind: int) -> socket.socket:
            sock = dialled(*kind)
            settle = sock.settimeout
            if threading.get_ident() != here:  # of another test, whose engines still dial
                return sock

            class Noted:
                def __getattr__(self, name: str) -> object:
                    return getattr(sock, name)

                def settimeout(self, seconds: float) -> None:
                    waited.append(seconds)
                    settle(seconds)

            return Noted()  # type: ignore[return-value]

        monkeypatch.setattr(forks, "new_socket", new_socket)
        with pytest.raises(TransportTimeout):
            Http("http://engine:80", timeout_s=1.0).get("health")
        assert len(waited) == 4
        assert sum(waited) <= 1.0


@contextmanager
def full_server() -> Iterator[tuple[str, int]]:
    """Where connections are neither taken nor refused."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


class Slow:
    """An `AsyncLLM` that answers nothing in time."""

    def __init__(self) -> None:
        self.is_paused, self.was_given_up = False, threading.Event()

    async def pause_generation(self, **_: object) -> None:
        self.is_paused = True
        try:
            await asyncio.sleep(30)
        finally:
            self.was_given_up.set()

    async def wake_up(self, tags: list[str]) -> None:
        self.is_paused = False


def test_a_call_within_this_process_ends_in_its_time_too() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        engine = Slow()
        client = AsyncClient(engine, loop, timeout_s=0.5)
        with pytest.raises(DeltaSyncError, match="did not answer"), client.paused():
            pass
        assert engine.was_given_up.wait(10)
        assert not engine.is_paused
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
