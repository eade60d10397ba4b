"""Settings that come from the environment of a process."""

from __future__ import annotations

import os


def network_secret() -> bytes | None:
    """The secret that ends on a network share: DELTASYNC_SECRET, or None if that is not set.

    Workers of engines take it by themselves. A trainer gives it to `collective.Sender`.
    """
    secret = os.environ.get("DELTASYNC_SECRET")
    return None if secret is None else os.fsencode(secret)  # what is no text is shown by no error


def wants_metrics() -> bool:
    """Whether workers of engines measure their syncs: DELTASYNC_METRICS is 1."""
    return os.environ.get("DELTASYNC_METRICS") == "1"
