"""What a name that one end does not know may be called there, for errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
# What else wrappers of models, and classes with a head, put into names.
_OFTEN = _WRAPPERS | {"module", "model", "base_model", "base_layer", "language_model"}
_TRIED = 3  # names for which others are searched


def suggested(missing: Sequence[str], others: Collection[str], *, are_sent: bool) -> str:
    """What to rename, as the tail of a message; "" if nothing looks alike.

    Args:
        missing: Names that the other end does not have.
        others: What it has.
        are_sent: Whether `missing` are the trainer's, and `others` the engine's.
    """
    for name in missing[:_TRIED]:
        if (other := near(name, others)) is not None:
            source, engine = (name, other) if are_sent else (other, name)
            return (
                f"; {other!r} is there: give the source a `rename=` from {source!r} to {engine!r}"
            )
        if are_sent and unwrapped(name) != name:
            return f"; give the source a `rename=` from {name!r} to {unwrapped(name)!r}"
    return ""


def near(name: str, others: Collection[str]) -> str | None:
    """Which of the others probably means the same tensor."""
    core = _core(name)
    alike = next((other for other in others if _core(other) == core), None)
    return alike or next(iter(get_close_matches(name, others, n=1, cutoff=0.9)), None)


def unwrapped(name: str) -> str:
    """Without what torch.compile, DDP and FSDP put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def is_wrapper(part: str) -> bool:
    """Whether a wrapper calls the module so that it wraps."""
    return part == "module" or part in _WRAPPERS


def _core(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _OFTEN)
