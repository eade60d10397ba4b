"""The sender's layout: which parameters travel, in which order and dtype, and who holds them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from deltasync import dtypes
from deltasync.delta.naming import suggested
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError, LayoutMismatch
from deltasync.sync.source.tensors import NamedTensor
from deltasync.sync.target.base import match_parameters, some_of
from deltasync.wire.messages import Hello, ParameterSpec, check_limits, layout_hash

logger = logging.getLogger(__name__)


class SentLayout:
    """The parameters as they travel.

    Attributes:
        specs: The layout: names, shapes, wire dtypes.
        hash: What names it in a begin.
        numel: Elements of all parameters.
        num_bytes: Bytes of all values on the wire.
    """

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self.specs = tuple(specs)
        self.hash = layout_hash(self.specs)
        self.numel = sum(spec.numel for spec in self.specs)
        self.num_bytes = sum(spec.numel * spec.dtype.item_size for spec in self.specs)


def check_engine(layout: SentLayout, hellos: Collection[Hello]) -> list[frozenset[int] | None]:
    """Which parameters each rank of an engine holds; None for all.

    An engine of one rank that names none takes all, as they are sent. Raises LayoutMismatch, by
    name, unless these fit and together are all that is sent.
    """
    every = frozenset(range(len(layout.specs)))
    held = [
        frozenset(match_parameters(hello.specs(), layout.specs))
        if hello.world > 1 or hello.parameters
        else every
        for hello in hellos
    ]
    missing = [layout.specs[number].name for number in sorted(every.difference(*held))]
    if missing:
        engine = next(iter(hellos)).engine
        theirs = {name for hello in hellos for spec in hello.specs() for name in spec.names}
        rest = theirs - {name for spec in layout.specs for name in spec.names}
        raise LayoutMismatch(
            f"{engine} takes nothing of {some_of(missing)}"
            f"{suggested(missing, rest, are_sent=True)}; if it has no use for that, leave it out: "
            f"SenderOptions(leave_out=[{missing[0]!r}])"
        )
    return [None if numbers == every else numbers for numbers in held]


def with_elements(specs: tuple[ParameterSpec, ...]) -> tuple[ParameterSpec, ...]:
    """The same. Raises ConfigError for a model that has no elements, or no tensors.

    Logs a warning that names what looks like a copy of what ZeRO-3 leaves: copies do not tell.
    """
    if not any(spec.numel for spec in specs):
        names = some_of([spec.name for spec in specs]) or "the source"
        raise ConfigError(f"no weights came: there are no elements in {names}, without `leave_out`")
    if empty := [spec.name for spec in specs if spec.shape == (0,)]:
        logger.warning(
            "%s have no elements, and are sent so: if ZeRO-3 has partitioned them, gather all "
            "first (deepspeed.zero.GatheredParameters)",
            some_of(empty),
        )
    return specs


def source_specs(tensors: Sequence[NamedTensor]) -> tuple[ParameterSpec, ...]:
    """The parameters in the dtypes that the source has.

    Raises ConfigError for one that no message can carry.
    """
    specs = tuple(ParameterSpec(e.names, e.shape, e.dtype) for e in tensors)
    check_limits(specs)
    return specs


def specs_of(
    source: Sequence[ParameterSpec], held: Sequence[ParameterSpec], overrides: Mapping[str, str]
) -> tuple[ParameterSpec, ...]:
    """The layout, whose wire dtypes are those that a receiver holds.

    Args:
        source: What there is, see `source_specs`.
        held: What the first receiver said that it holds.
        overrides: Wire dtype names by name pattern (as in `fnmatch`); they win.
    """
    told = {name: spec.dtype for spec in held for name in spec.names}
    return tuple(_spec(spec, told, overrides) for spec in source)


def _spec(
    spec: ParameterSpec, told: Mapping[str, Dtype], overrides: Mapping[str, str]
) -> ParameterSpec:
    dtype = next((told[name] for name in spec.names if name in told), spec.dtype)
    for pattern, name in overrides.items():
        if any(fnmatchcase(own, pattern) for own in spec.names):
            dtype = _named(name)
    if dtype != spec.dtype:
        _check_cast(spec, dtype)
    return replace(spec, dtype=dtype)


def _check_cast(spec: ParameterSpec, dtype: Dtype) -> None:
    """Raise ConfigError unless values mean the same in the other dtype, but for rounding."""
    if not (dtype.is_floating and spec.dtype.is_floating):
        raise ConfigError(f"{spec.name}: {spec.dtype.name} cannot be sent as {dtype.name}")
    if 1 in (dtype.item_size, spec.dtype.item_size):
        raise ConfigError(
            f"{spec.name}: the trainer has {spec.dtype.name}, and {dtype.name} is asked for by the "
            "engine or by `wire_dtypes`: floats of one byte have scales beside them, so let the "
            "trainer send what the engine serves (deltasync.quant)"
        )


def _named(name: str) -> Dtype:
    try:
        return dtypes.BY_NAME[name]
    except KeyError:
        raise ConfigError(f"wire_dtypes: {name!r} is not one of {sorted(dtypes.BY_NAME)}") from None
