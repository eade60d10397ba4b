"""A trainer's weights as an engine serves them: a source of served tensors, and of streams.

A matrix and its scales are never of two versions. All parts of a matrix, and the scales that it
shares with others, are computed of the weights as they are when `send_weights` or `take` reads
them; one sync carries all that differs, and receivers commit that as one version or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from deltasync.delta.shard import ShardSpec
from deltasync.errors import ConfigError
from deltasync.quant.form import Form
from deltasync.quant.matrices import WEIGHT, Matrix, ServedReader
from deltasync.quant.sharing import FUSED, Fused, Shared, siblings
from deltasync.sync.source.tensors import NamedTensor, WeightSource, held_of

Forms = Callable[[str, tuple[int, ...]], Form | None]
"""Maps the name and shape of a checkpoint tensor to its form; None if it is served as it is."""


class ServedSource:
    """A source as engines serve it: matrices in their forms, everything else as it is.

    What is quantized is the bfloat16 rounding of a matrix, also if the trainer holds float32: from
    the masters themselves nearly all scales would change in every step.

    Args:
        source: The trainer's weights; read, never written.
        forms: Says which tensors are quantized, and how.
        fused: Says which matrices share their scales, if the form has scales of whole matrices.
        constants: What a quantized checkpoint holds and no weight determines, by name: scales of
            activations (`input_scale`, `input_global_scale`), as the engine's checkpoint has them.

    Attributes:
        module: That of the source, if it has one.
    """

    def __init__(
        self,
        source: WeightSource,
        forms: Forms,
        *,
        fused: Fused = FUSED,
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._source, self._forms, self._fused = source, forms, fused
        self.module = getattr(source, "module", None)
        self._constants = [NamedTensor((name,), one) for name, one in (constants or {}).items()]
        self._all: list[NamedTensor] | None = None
        self._tensors: list[NamedTensor] = []
        self._held_in_part: list[Matrix] = []
        self._shared: dict[tuple[tuple[str, ...], Form], Shared] = {}

    def tensors(self) -> list[NamedTensor]:
        """Raises ConfigError, by name, for a tensor that cannot be served in its form."""
        tensors = self._source.tensors()
        if tensors is not self._all:
            self._all, self._held_in_part, self._shared = None, [], {}
            self._tensors = [one for tensor in tensors for one in self._served(tensor)]
            self._tensors += self._constants
            often = Counter(name for tensor in self._tensors for name in tensor.names)
            if twice := [name for name, count in often.items() if count > 1]:
                raise ConfigError(f"{twice[0]}: served, and a tensor of the trainer; rename that")
            self._all = tensors
        for shared in self._shared.values():
            shared.changed()
        for matrix in self._held_in_part:
            matrix.changed()
        return self._tensors

    def _served(self, entry: NamedTensor) -> Iterator[NamedTensor]:
        form = _form_of(entry.names, entry.shape, self._forms)
        if form is None:
            yield entry
            return
        held, local = held_of(entry)
        is_part = held.size != held.shape
        if is_part and not held.numel:
            return
        if is_part:
            _check_part(entry, held, form)
        shared = Shared(form)
        if form.shares:
            together = siblings(entry.name, self._fused)
            shared = self._shared.setdefault((together, form), Shared(form, together))
        local = local.detach().requires_grad_(entry.tensor.requires_grad)
        held = held if is_part else ShardSpec.whole(entry.shape)
        matrix = Matrix(local, form, name=entry.name, held=held, shared=shared)
        if is_part:
            self._held_in_part.append(matrix)
        for suffix in matrix.parts:
            names = tuple(_named(name, suffix) for name in entry.names)
            reader = ServedReader(matrix, suffix)
            yield NamedTensor(names, local, matrix.shards.get(suffix), computed=reader)


def served_weights(
    weights: Iterable[tuple[str, Tensor]], forms: Forms, *, fused: Fused = FUSED
) -> Iterator[tuple[str, Tensor]]:
    """The same for `StreamedWeights.take`: (name, tensor) of what is served, one by one.

    Matrices that share a scale are copied and held back until all have come: the fused ones of one
    layer, mostly two or three. Where a model lacks one of them, that is at the end of `weights`.

    Raises ConfigError, by name, for a tensor that cannot be served in its form, or is not finite.
    `weights` is also gone through to its end then.
    """
    rest, held = iter(weights), dict[tuple[tuple[str, ...], Form], list[Matrix]]()
    try:
        for name, tensor in rest:
            form = _form_of((name,), tuple(tensor.shape), forms)
            if form is None:
                yield name, tensor
                continue
            matrix = Matrix(tensor.detach(), form, name=name)
            names = siblings(name, fused) if form.shares else (name,)
            if len(names) > 1:
                matrix = matrix.copy()
            group = held.setdefault((names, form), [])
            group.append(matrix)
            if len(group) == len(names):
                yield from _together(held.pop((names, form)))
        for group in held.values():
            yield from _together(group)
    finally:
        for _ in rest:  # other ranks may take part in gathering them
            pass


def _together(group: list[Matrix]) -> Iterator[tuple[str, Tensor]]:
    """What is served of matrices that share their scales."""
    shared = Shared(group[0].form)
    for matrix in group:
        matrix.share(shared)
    for matrix in group:
        matrix.check()
        for suffix in matrix.parts:
            yield _named(matrix.name, suffix), matrix.served(suffix)


def _check_part(entry: NamedTensor, held: ShardSpec, form: Form) -> None:
    """Raise ConfigError, by name, for a part that is not quantized by what ranks agree on."""
    if len(held.shape) != 2:
        raise ConfigError(
            f"{entry.name}: this rank holds {held.size} at {held.offset} of {held.shape}, and "
            f"{form.name} is for matrices; split stacked ones by `name_map`"
        )


def _form_of(names: Sequence[str], shape: tuple[int, ...], forms: Forms) -> Form | None:
    """The form of a tensor. Raises ConfigError if it has another under another of its names."""
    form, *others = (forms(name, shape) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other != form:
            raise ConfigError(
                f"{names[0]} is served as {_called(form)}, and {name}, which is tied to it, as "
                f"{_called(other)}: untie them, or serve both alike"
            )
    return form


def _called(form: Form | None) -> str:
    return "it is" if form is None else form.name


def _named(name: str, suffix: str) -> str:
    """What a part of a weight is called in checkpoints."""
    return f"{name.removesuffix(WEIGHT)}.{suffix}"
