"""JSON over HTTP to an engine's server."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from deltasync.errors import ConfigError, EngineFailed, PeerLost, TransportTimeout
from deltasync.sync.protocol.links import check_seconds

_MAX_REASON = 4096
_MAX_ANSWER = 64 << 20


class Http:
    """HTTP calls to one server.

    Args:
        url: The server's scheme, host and port.
        api_key: Sent as a bearer token with each call; None if the server needs none.
        timeout_s: For each call.

    Attributes:
        url: The same, without a slash at its end.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no http or https address")
        if "@" in url:
            raise ConfigError(f"{url!r} names a user: give api_key, and the URL without it")
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """Return the parsed JSON of a GET. Raises as `post`."""
        return self._call(Request(f"{self.url}/{path}", headers=self._headers))

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
        return self._call(Request(f"{self.url}/{path}{asked}", data, self._headers))

    def _call(self, request: Request) -> Any:
        where = request.full_url
        try:
            with _OPENER.open(request, timeout=self._timeout_s) as response:
                text = response.read(_MAX_ANSWER)
        except HTTPError as error:
            said = f"{where}: {error.code} {error.reason}: {_reason(error)}"
            raise EngineFailed(said, status=error.code) from error
        except TimeoutError as error:
            raise TransportTimeout(f"{where} did not answer in {self._timeout_s} s") from error
        except (OSError, HTTPException) as error:
            raise PeerLost(f"{where} does not answer: {error}") from error
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise EngineFailed(f"{where} does not answer in JSON: {text[:200]!r}") from error


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: a redirected POST would arrive as a GET."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = build_opener(ProxyHandler({}), _NoRedirect())  # and uses no proxy


def _reason(error: HTTPError) -> str:
    try:
        return error.read(_MAX_REASON).decode(errors="replace")
    except OSError:
        return "no reason given"
