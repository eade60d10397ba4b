"""TCP between hosts: how to listen and dial, and a warning where nothing is signed."""

from __future__ import annotations

import ipaddress
import socket
import warnings

from deltasync.errors import ConfigError
from deltasync.transports import forks
from deltasync.transports.control.connection import deadline_in, left_s


def check_network(host: str, secret: bytes | None) -> None:
    """Raise ConfigError for what is no name of a host, and for a secret that is none."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError(f"{host[:80]!r} is no name or address of a host") from None
    if not isinstance(secret, bytes | None):
        raise ConfigError(f"secret is a {type(secret).__name__}: give bytes")
    if secret is not None and not secret:
        raise ConfigError("an empty secret protects nothing; leave it out or set one")


def warn_of_strangers(host: str, port: int) -> None:
    """Warn that whoever reaches this address is let in, unless it is of this machine alone."""
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        warnings.warn(
            f"{host}:{port} is served without a secret: whoever reaches it can take the weights "
            "and stop syncs; give both ends the same secret=, in a network that you trust",
            stacklevel=3,
        )


def dial_tcp(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """A connection to `host`:`port`, blocking. Raises OSError, at the latest after `timeout_s`.

    That is for all addresses of the host, each of which gets its part.
    """
    failure, deadline = OSError(f"{host} has no address"), deadline_in(timeout_s)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, _, _, where) in enumerate(found):
        sock = forks.new_socket(family, kind)
        try:
            sock.settimeout(max(left_s(deadline) / (len(found) - number), 0.001))
            sock.connect(where)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def listen_tcp(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`:`port`. Raises ConfigError if it cannot."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"cannot listen on {host}:{port}: ports are 1 to 65535, or 0 for any")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with forks.making:
            server = socket.create_server((host, port), family=family)
            return forks.closed_in_children(server)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; give an address of this host and a free port"
        ) from error
