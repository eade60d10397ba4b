"""Settings that come from the environment of a process."""

from __future__ import annotations

import os
from pathlib import Path

from deltasync.errors import ConfigError


def network_secret() -> bytes | None:
    """The secret that ends on a network share: DELTASYNC_SECRET, or None if that is not set.

    Workers of engines take it by themselves. A trainer gives it to `collective.Sender`.
    """
    secret = os.environ.get("DELTASYNC_SECRET")
    return None if secret is None else os.fsencode(secret)  # what is no text is shown by no error


def read_secret(path: str | Path) -> bytes:
    """The secret or key in a file, as `--secret` and `--key-file` of every command read it.

    A line of text counts without the line break that `echo` and editors add, as in `$(cat FILE)`.
    Of anything else, such as random bytes, all counts. Raises ConfigError.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    line = data.rstrip(b"\r\n")
    try:
        secret = line if line.decode().isprintable() else data
    except UnicodeDecodeError:
        secret = data
    if not secret:
        raise ConfigError(f"{path} is empty: a secret is expected there")
    return secret


def wants_metrics() -> bool:
    """Whether workers of engines measure their syncs: DELTASYNC_METRICS is 1."""
    return os.environ.get("DELTASYNC_METRICS") == "1"
