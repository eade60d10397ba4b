"""The sender's layout: which parameters travel, in which order and dtype, and who holds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod

from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import WireReader, dtype_of, identity
from deltasync.delta.routes.naming import suggested
from deltasync.delta.shard import (
    ShardSpec,
    Share,
    bands_of,
    contains,
    is_sharded,
    local_of,
    narrowed,
)
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError, LayoutMismatch, SourceChanged
from deltasync.sync.source.tensors import NamedTensor, WeightSource, held_of
from deltasync.sync.target.module import match_parameters, some_of
from deltasync.wire.messages import Hello, ParameterSpec, check_limits, layout_hash


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

    def numbers_held(self, hello: Hello) -> frozenset[int] | None:
        """Which parameters a receiver holds; None for all. Raises LayoutMismatch.

        An engine of one rank that names none takes all, as they are sent.
        """
        if hello.world == 1 and not hello.parameters:
            return None
        numbers = frozenset(match_parameters(hello.specs(), self.specs))
        return None if len(numbers) == len(self.specs) else numbers


class SourceLayout(SentLayout):
    """The same, and the live source of those that are sent from here.

    Attributes:
        sent: What is compared and sent here: all of `specs`, or shares of them.
        readers: The live source in that order; rebuilt where storage was replaced.
    """

    def __init__(
        self,
        source: WeightSource,
        specs: Sequence[ParameterSpec],
        boxes: Mapping[str, ShardSpec] | None = None,
    ) -> None:
        """Look up where everything is.

        Args:
            source: Where the parameters are.
            specs: The layout.
            boxes: What to send, by canonical name; None for everything.
        """
        super().__init__(specs)
        self._source, self._boxes = source, boxes
        self._numbers = {spec.name: number for number, spec in enumerate(self.specs)}
        self._tensors: list[NamedTensor] = []
        self._known: dict[str, tuple[tuple[object, ...], list[WireReader]]] = {}
        self.readers: list[WireReader] = []
        tensors = source.tensors()
        self._names = [entry.names for entry in tensors]
        self.sent = self._shares(tensors)
        self._read(tensors)

    def refresh(self) -> None:
        """Look at the source again. Raises SourceChanged if it is not the same model any more."""
        tensors = self._source.tensors()
        if tensors is not self._tensors and [t.names for t in tensors] != self._names:
            raise SourceChanged("parameters or ties appeared or vanished; make a new WeightSender")
        self._read(tensors)

    def _shares(self, tensors: list[NamedTensor]) -> tuple[ParameterSpec, ...]:
        """What is sent of them. Raises ConfigError for parts, if everything is to be sent."""
        if self._boxes is not None:
            return tuple(
                Share.of(self._numbers[entry.name], self.specs[self._numbers[entry.name]], band)
                for entry in self._in_order(tensors)
                for _, band in bands_of(self._boxes[entry.name])
            )
        for entry in tensors:
            if entry.shard is None and not is_sharded(entry.tensor):
                continue
            box = held_of(entry)[0]
            if box.numel < prod(box.shape):
                raise ConfigError(
                    f"this rank holds {box.numel} of {prod(box.shape)} elements of {entry.name!r}: "
                    "give the senders of all ranks a `group`"
                )
        return self.specs

    def _in_order(self, tensors: list[NamedTensor]) -> list[NamedTensor]:
        """Those of which something is sent here, as they are numbered."""
        boxes = self._boxes
        if boxes is None:
            return tensors
        here = [entry for entry in tensors if entry.name in boxes]
        return sorted(here, key=lambda entry: self._numbers[entry.name])

    def _read(self, tensors: list[NamedTensor]) -> None:
        if tensors is self._tensors:
            return
        known, self._known = self._known, {}
        for entry in self._in_order(tensors):
            held, local = (None, local_of(entry.tensor)) if self._boxes is None else held_of(entry)
            now = (held, *identity(local))
            before, readers = known.get(entry.name, ((), []))
            if before != now:
                readers = self._readers_of(entry, held, local)
            self._known[entry.name] = now, readers
        self.readers = [reader for _, readers in self._known.values() for reader in readers]
        self._tensors = tensors

    def _readers_of(
        self, entry: NamedTensor, held: ShardSpec | None, local: Tensor
    ) -> list[WireReader]:
        spec = self.specs[self._numbers[entry.name]]
        if entry.shape != spec.shape:
            raise SourceChanged(
                f"{spec.name}: shape {spec.shape} became {entry.shape}; make a new WeightSender"
            )
        if self._boxes is None or held is None:
            return [WireReader.of(local, spec.dtype, name=spec.name)]
        box = self._boxes[entry.name]
        if not contains(held, box):
            raise SourceChanged(f"{spec.name}: is sharded anew; make new senders on all ranks")
        local = narrowed(local, held, box)
        return [
            WireReader.of(local[index], spec.dtype, name=spec.name) for index, _ in bands_of(box)
        ]

    @property
    def device_types(self) -> set[str]:
        """Types of the devices that the source lives on."""
        return {reader.flat.line.device.type for reader in self.readers}

    def coverage(self, changed: Collection[int], *, full: bool) -> dict[str, int]:
        """What became of the parameters: "changed", "unchanged", "frozen"; adds up to all."""
        trained = [entry.tensor.requires_grad for entry in self._tensors]
        return coverage_of(trained, changed, full=full)


def check_engine(layout: SentLayout, hellos: Collection[Hello]) -> list[frozenset[int] | None]:
    """Which parameters each rank of an engine holds; None for all.

    Raises LayoutMismatch, by name, unless these fit and together are all that is sent.
    """
    held = [layout.numbers_held(hello) for hello in hellos]
    if any(numbers is None for numbers in held):
        return held
    covered = frozenset().union(*(numbers for numbers in held if numbers is not None))
    missing = [spec.name for number, spec in enumerate(layout.specs) if number not in covered]
    if missing:
        engine = next(iter(hellos)).engine
        theirs = {name for hello in hellos for spec in hello.specs() for name in spec.names}
        rest = theirs - {name for spec in layout.specs for name in spec.names}
        raise LayoutMismatch(
            f"{engine} takes nothing of {some_of(missing)}"
            f"{suggested(missing, rest, are_sent=True)}; if it has no use for that, leave it out: "
            f"SenderOptions(leave_out=[{missing[0]!r}])"
        )
    return held


def coverage_of(trained: Sequence[bool], changed: Collection[int], *, full: bool) -> dict[str, int]:
    """How many parameters are "changed", "unchanged", "frozen", by whether each is trained."""
    if full:
        changed = range(len(trained))
    others = set(range(len(trained))).difference(changed)
    unchanged = sum(trained[number] for number in others)
    return {"changed": len(changed), "unchanged": unchanged, "frozen": len(others) - unchanged}


def source_specs(tensors: Sequence[NamedTensor]) -> tuple[ParameterSpec, ...]:
    """The parameters in the dtypes that the source has.

    Raises ConfigError for one that no message can carry.
    """
    specs = tuple(ParameterSpec(e.names, e.shape, dtype_of(e.tensor, name=e.name)) for e in tensors)
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
    if dtype != spec.dtype and not (dtype.is_floating and spec.dtype.is_floating):
        raise ConfigError(f"{spec.name}: {spec.dtype.name} cannot be sent as {dtype.name}")
    return replace(spec, dtype=dtype)


def _named(name: str) -> Dtype:
    try:
        return dtypes.BY_NAME[name]
    except KeyError:
        raise ConfigError(f"wire_dtypes: {name!r} is not one of {sorted(dtypes.BY_NAME)}") from None
