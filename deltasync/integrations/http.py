"""JSON over HTTP to an engine's server."""

from __future__ import annotations

import io
import json
import socket
import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from deltasync.errors import ConfigError, EngineFailed, PeerLost, TransportTimeout
from deltasync.sync.protocol.links import check_seconds
from deltasync.transports.control.connection import deadline_in, left_s
from deltasync.transports.control.tcp import dial_tcp

_MAX_REASON = 4096
_MAX_ANSWER = 64 << 20

T = TypeVar("T")


class Http:
    """HTTP calls to one server, by no proxy. A redirect is not followed: it is an error.

    Args:
        url: The server's scheme, host and port.
        api_key: Sent as a bearer token with each call; None if the server needs none.
        timeout_s: For each call, from dialling to the last byte of the answer.
        of: What serves there, for messages.
        started: How it has to be started, for messages.

    Attributes:
        url: The same, without a slash at its end.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        of: str = "engine",
        started: str = "",
    ) -> None:
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no http or https address")
        if "@" in url:
            raise ConfigError(f"{url!r} names a user: give api_key, and the URL without it")
        self.url, self._timeout_s, self._of = url.rstrip("/"), timeout_s, of
        self._remedy = f"give the URL of one {started}".rstrip()
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """Return the parsed JSON of a GET. Raises as `post`."""
        return self._call("GET", f"{self.url}/{path}")

    def post(self, path: str, body: object = None, **query: str | bool) -> Any:
        """Return the parsed JSON of a POST, or None if the response is empty.

        Raises:
            EngineFailed: The server returned an error.
            PeerLost: The server cannot be reached.
            TransportTimeout: The server did not respond in time.
        """
        words = {key: str(value).lower() for key, value in query.items()}
        asked = f"?{urlencode(words)}" if words else ""
        data = b"" if body is None else json.dumps(body).encode()
        return self._call("POST", f"{self.url}/{path}{asked}", data)

    def value_of(self, answer: object, name: str, kind: type[T]) -> T:
        """Return a value of a JSON object. Raises ConfigError if it has none of that type."""
        value = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise ConfigError(
                f"{self.url} is no {self._of} server that is supported: its answer has no "
                f"{kind.__name__} {name!r}; {self._remedy}"
            )
        return value

    def _call(self, method: str, where: str, data: bytes | None = None) -> Any:
        try:
            status, reason, text = self._answer(method, where, data)
        except TimeoutError as error:
            raise TransportTimeout(f"{where} did not answer in {self._timeout_s} s") from error
        except (OSError, HTTPException, ValueError) as error:  # of names, and of sizes below 0
            raise PeerLost(f"{where} does not answer: {error}") from error
        if not 200 <= status < 300:
            said = text[:_MAX_REASON].decode(errors="replace")
            if status == 404:
                said = f"{said}; {self.url} is no {self._of} server that takes this: {self._remedy}"
            raise EngineFailed(f"{where}: {status} {reason}: {said}", status=status)
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:
            raise EngineFailed(f"{where} does not answer in JSON: {text[:200]!r}") from error

    def _answer(self, method: str, where: str, data: bytes | None) -> tuple[int, str, bytes]:
        """(status, reason, body), of a success all of it. Raises OSError, HTTPException."""
        deadline, parts = deadline_in(self._timeout_s), urlsplit(where)
        link = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(parts.netloc)
        sock = dial_tcp(link.host, link.port, timeout_s=left_s(deadline))
        if isinstance(link, HTTPSConnection):
            context = ssl.create_default_context()
            sock = context.wrap_socket(_InTime(sock, deadline).socket, server_hostname=link.host)
        with sock:
            link.sock = _InTime(sock, deadline)
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            unsent: OSError | None = None
            try:
                link.request(method, target, data, self._headers)
            except ConnectionError as error:  # it may have answered before it has read all
                unsent = error
            answer = link.getresponse()
            text = answer.read(_MAX_ANSWER)
            if 200 <= answer.status < 300:
                if unsent is not None:
                    raise unsent
                if answer.length or not (text or answer.chunked or answer.length == 0):
                    raise IncompleteRead(text, answer.length)
            return answer.status, answer.reason, text


class _InTime(io.RawIOBase):
    """A connection on which everything ends at one deadline, however slowly bytes come and go."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = sock, deadline

    @property
    def socket(self) -> socket.socket:
        """With what is left as its timeout. Raises TimeoutError."""
        timeout_s = left_s(self._deadline)
        if not timeout_s:
            raise TimeoutError
        self._socket.settimeout(timeout_s)
        return self._socket

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.socket.send(view) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_InTime(self._socket, self._deadline))

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self.socket.recv_into(into)
