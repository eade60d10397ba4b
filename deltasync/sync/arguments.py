"""What is given to the two ends, looked at before it is used: near misses are told apart."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

from deltasync.errors import ConfigError
from deltasync.sync.options import ReceiverOptions, SenderOptions
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights, OwnWeights
from deltasync.wire.messages import MAX_ENGINE, is_unicode


def check_target(target: object) -> None:
    """Raises ConfigError unless a receiver can write to it."""
    if not hasattr(target, "bind"):
        raise ConfigError(f"target is a {_kind(target)}; give ModuleTarget(module), or another one")


def check_receiver(
    target: object, links: Iterable[object], options: object, engine: object
) -> None:
    """Raises ConfigError for what a receiver cannot be made of."""
    check_target(target)
    is_name = isinstance(engine, str) and 0 < len(engine) <= MAX_ENGINE and is_unicode(engine)
    if not is_name:
        raise ConfigError(f"engine is {str(engine)[:80]!r}: give 1 to {MAX_ENGINE} characters")
    for link in links:
        check_transport(link, "Receiver")
    check_options(options, ReceiverOptions)


def check_transport(transport: object, end: Literal["Sender", "Receiver"]) -> None:
    """Raises ConfigError unless it is this end of a link."""
    if isinstance(transport, (str, os.PathLike)):
        raise ConfigError(
            f"transport is {os.fspath(transport)!r}, an address: make an end of it, for instance "
            f"deltasync.transports.shared_memory.{end}({os.fspath(transport)!r})"
        )
    if not hasattr(transport, "poll" if end == "Sender" else "reply"):
        raise ConfigError(
            f"transport is a {_kind(transport)}; give a {end} of a module of deltasync.transports"
        )


def check_options(options: object, kind: type) -> None:
    """Raises ConfigError for options of another kind; None stands for the defaults."""
    if options is not None and not isinstance(options, kind):
        raise ConfigError(f"options is a {_kind(options)}; give {kind.__name__}(...)")


def check_coding(options: SenderOptions) -> None:
    """Raises ConfigError for a codec that links do not take."""
    if options.compression == "class":
        raise ConfigError(
            "compression='class' is for stores and patch files: it is coded in host memory, and "
            "receivers of parts cannot read it; for a link use 'gap'"
        )


def _kind(value: object) -> str:
    return type(value).__name__


def local_weights(
    source: WeightSource | LocalWeights, options: SenderOptions | None
) -> LocalWeights:
    """The weights of a source, with these options. Raises ConfigError if they have their own."""
    if not isinstance(source, LocalWeights):
        if not hasattr(source, "tensors"):
            kind = _kind(source)
            raise ConfigError(f"source is a {kind}; give ModuleSource(module), or another one")
        return OwnWeights(source, options or SenderOptions())
    if options is not None:
        raise ConfigError("these weights have options of their own")
    return source
