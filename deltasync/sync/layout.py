"""The sender's layout: which parameters travel, in which order and dtype, and who holds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from deltasync import dtypes
from deltasync.delta.bits import WireReader, dtype_of, identity
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError, LayoutMismatch, SourceChanged
from deltasync.sync.source import NamedTensor, WeightSource
from deltasync.sync.target import match_parameters
from deltasync.wire.messages import Hello, ParameterSpec, layout_hash


class SourceLayout:
    """The source's parameters as they travel.

    Attributes:
        specs: The layout: names, shapes, wire dtypes.
        hash: What names it in a begin.
        numel: Elements of all parameters.
        num_bytes: Bytes of all values on the wire.
        readers: The live source in that order; rebuilt where storage was replaced.
    """

    def __init__(
        self, source: WeightSource, held: Sequence[ParameterSpec], overrides: Mapping[str, str]
    ) -> None:
        """Take the wire dtypes from what a receiver holds.

        Args:
            source: Where the parameters are.
            held: What the first receiver said that it holds.
            overrides: Wire dtype names by name pattern (as in `fnmatch`); they win.
        """
        self._source = source
        tensors = source.tensors()
        told = {name: spec.dtype for spec in held for name in spec.names}
        self.specs = tuple(_spec(tensor, told, overrides) for tensor in tensors)
        self.hash = layout_hash(self.specs)
        self.numel = sum(spec.numel for spec in self.specs)
        self.num_bytes = sum(spec.numel * spec.dtype.item_size for spec in self.specs)
        self._names = [spec.names for spec in self.specs]
        self._tensors: list[NamedTensor] = []
        self._identities: list[tuple[object, ...]] = [()] * len(tensors)
        self.readers: list[WireReader] = []
        self._read(tensors)

    def refresh(self) -> None:
        """Look at the source again. Raises SourceChanged if it is not the same model any more."""
        tensors = self._source.tensors()
        if tensors is not self._tensors and [t.names for t in tensors] != self._names:
            raise SourceChanged("parameters or ties appeared or vanished; make a new WeightSender")
        self._read(tensors)

    def numbers_held(self, hello: Hello) -> frozenset[int] | None:
        """Which parameters a receiver holds; None for all. Raises LayoutMismatch."""
        numbers = frozenset(match_parameters(hello.specs(), self.specs))
        if len(numbers) == len(self.specs):
            return None
        if hello.world == 1:
            missing = next(s.name for n, s in enumerate(self.specs) if n not in numbers)
            raise LayoutMismatch(f"{hello.engine} has no parameter {missing!r}")
        return numbers

    def _read(self, tensors: list[NamedTensor]) -> None:
        if tensors is self._tensors:
            return
        known: Sequence[WireReader | None] = self.readers or [None] * len(tensors)
        readers: list[WireReader] = []
        identities = [identity(entry.tensor) for entry in tensors]
        for number, (spec, entry) in enumerate(zip(self.specs, tensors, strict=True)):
            reader = known[number]
            if reader is None or self._identities[number] != identities[number]:
                if tuple(entry.tensor.shape) != spec.shape:
                    raise SourceChanged(
                        f"{spec.name}: shape {spec.shape} became {tuple(entry.tensor.shape)}; "
                        "make a new WeightSender"
                    )
                reader = WireReader.of(entry.tensor, spec.dtype, name=spec.name)
            readers.append(reader)
        self.readers, self._identities, self._tensors = readers, identities, tensors

    @property
    def device_types(self) -> set[str]:
        """Types of the devices that the source lives on."""
        return {reader.flat.line.device.type for reader in self.readers}

    def coverage(self, changed: Collection[int], *, full: bool) -> dict[str, int]:
        """What became of the parameters: "changed", "unchanged", "frozen"; adds up to all."""
        if full:
            return {"changed": len(self.specs), "unchanged": 0, "frozen": 0}
        others = set(range(len(self.specs))).difference(changed)
        is_trained = [self.readers[number].flat.tensor.requires_grad for number in others]
        frozen = len(others) - sum(is_trained)
        return {"changed": len(changed), "unchanged": sum(is_trained), "frozen": frozen}


def check_coverage(
    specs: Sequence[ParameterSpec], held: Sequence[frozenset[int] | None], *, engine: str
) -> None:
    """Raises LayoutMismatch unless the ranks of an engine together hold every parameter."""
    if any(numbers is None for numbers in held):
        return
    covered = frozenset().union(*(numbers for numbers in held if numbers is not None))
    for number, spec in enumerate(specs):
        if number not in covered:
            raise LayoutMismatch(f"no rank of {engine} has the parameter {spec.name!r}")


def _spec(
    entry: NamedTensor, told: Mapping[str, Dtype], overrides: Mapping[str, str]
) -> ParameterSpec:
    dtype = next((told[name] for name in entry.names if name in told), dtype_of(entry.tensor))
    for pattern, name in overrides.items():
        if any(fnmatchcase(own, pattern) for own in entry.names):
            dtype = _named(name)
    return ParameterSpec(entry.names, tuple(entry.tensor.shape), dtype)


def _named(name: str) -> Dtype:
    try:
        return dtypes.BY_NAME[name]
    except KeyError:
        raise ConfigError(f"wire_dtypes: {name!r} is not one of {sorted(dtypes.BY_NAME)}") from None
