"""A proxy before an S3 server, that answers with errors, late, or not at all."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("error", "lost request", "lost answer", "slow", "cut")

Choose = Callable[[str, str], str | None]
"""(method, path) -> the fault of this request, one of FAULTS; None for none."""


class Faults:
    """What the proxy does; a test may change `choose` while it runs.

    Attributes:
        choose: Chooses the fault of a request.
        slow_s: Seconds that a slow answer waits.
        bytes_per_s: How fast objects come down, all of them together; None for no limit.
        lists: Answers to lists, which are given again and again; None to ask each time.
        down_bytes: Of objects that have come down.
    """

    def __init__(self) -> None:
        self.choose: Choose = lambda method, path: None
        self.slow_s = 1.5
        self.bytes_per_s: float | None = None
        self.lists: dict[str, bytes] | None = None
        self.down_bytes = 0
        self._link = threading.Lock()

    def send(self, data: bytes, write: Callable[[bytes], object]) -> None:
        """Send an answer as fast as the link is."""
        for start in range(0, len(data), 1 << 16):
            piece = data[start : start + (1 << 16)]
            with self._link:
                self.down_bytes += len(piece)
                began = time.monotonic()
                while (rate := self.bytes_per_s) is not None:  # it may change meanwhile
                    left_s = began + len(piece) / rate - time.monotonic()
                    if left_s <= 0:
                        break
                    time.sleep(min(left_s, 0.1))
            write(piece)


@contextlib.contextmanager
def faulty(endpoint: str) -> Iterator[tuple[str, Faults]]:
    """(endpoint, faults) of a proxy before `endpoint`."""
    faults, behind = Faults(), urlsplit(endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Silence."""

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = faults.choose(self.command, self.path)
            if fault == "lost request":
                self.close_connection = True
                return
            if fault == "error":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            connection = http.client.HTTPConnection(str(behind.hostname), behind.port, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
            headers["Host"] = self.headers["Host"]
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            if "list-type" in self.path and faults.lists is not None:
                data = faults.lists.setdefault(self.path, data)
            if fault == "slow":
                time.sleep(faults.slow_s)
            if fault == "lost answer":
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(key, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if fault == "cut":
                self.close_connection = True
                data = data[: len(data) // 2]
            with contextlib.suppress(OSError):  # who asked may have left
                faults.send(data, self.wfile.write)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Clients that leave are no news."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)
