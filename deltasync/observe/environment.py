"""Metrics of processes that nobody but an engine starts, by the environment."""

from __future__ import annotations

import logging
from functools import cache

from deltasync.config import wants_metrics
from deltasync.errors import ConfigError
from deltasync.sync.events import subscribe

logger = logging.getLogger(__name__)


@cache
def subscribe_metrics() -> None:
    """Subscribe a `Metrics`, once in a process, if DELTASYNC_METRICS asks for it.

    If that is not possible, it is logged: an engine syncs without metrics rather than not at all.
    """
    if not wants_metrics():
        return
    try:
        from deltasync.observe.metrics import Metrics

        subscribe(Metrics())
    except (ImportError, ConfigError) as error:
        logger.warning("DELTASYNC_METRICS is set, and there are no metrics: %s", error)
