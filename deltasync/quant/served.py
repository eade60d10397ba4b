"""A trainer's weights as an engine serves them: a source of served tensors, and of streams.

A matrix and its scales are never of two versions. All parts of a matrix, and the scales that it
shares with others, are computed of the weights as they are when `send_weights` or `take` reads
them; one sync carries all that differs, and receivers commit that as one version or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Computation, Flat, WireReader, as_bits, integer_dtype, torch_dtype
from deltasync.delta.shard import ShardSpec, is_sharded
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.sharing import FUSED, Fused, Shared, siblings
from deltasync.sync.source.tensors import NamedTensor, WeightSource, held_of

Forms = Callable[[str, tuple[int, ...]], Form | None]
"""Maps the name and shape of a checkpoint tensor to its form; None if it is served as it is."""

_BFLOAT16 = dtypes.BY_NAME["bfloat16"]
_WEIGHT = ".weight"
_CHECKED = 1 << 22  # elements looked at at once


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
        self._constants = [NamedTensor((name,), one) for name, one in (constants or {}).items()]
        self._all: list[NamedTensor] | None = None
        self._tensors: list[NamedTensor] = []
        self._matrices: list[Matrix] = []
        self._shared: dict[tuple[tuple[str, ...], Form], Shared] = {}
        self._parts: dict[str, tuple[str, ...]] = {}  # siblings, where ranks may hold parts

    def tensors(self) -> list[NamedTensor]:
        """Raises ConfigError, by name, for a tensor that cannot be served in its form."""
        tensors = self._source.tensors()
        if tensors is not self._all:
            self._all, self._matrices, self._shared, self._parts = None, [], {}, {}
            self._tensors = [one for tensor in tensors for one in self._served(tensor)]
            self._tensors += self._constants
            often = Counter(name for tensor in self._tensors for name in tensor.names)
            if twice := [name for name, count in often.items() if count > 1]:
                raise ConfigError(f"{twice[0]}: served, and a tensor of the trainer; rename that")
            self._check_siblings()
            self._all = tensors
        for matrix in self._matrices:
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
        shared = None
        if form.shares:
            names = siblings(entry.name, self._fused)
            shared = self._shared.setdefault((names, form), Shared(form))
            if entry.shard is not None or is_sharded(entry.tensor):
                self._parts[entry.name] = names
        local = local.detach().requires_grad_(entry.tensor.requires_grad)
        shape = held.size if is_part else entry.shape
        matrix = Matrix(local, form, name=entry.name, shape=shape, shared=shared)
        self._matrices.append(matrix)
        shards = matrix.lies_in(held) if is_part else {}
        for suffix in matrix.parts:
            names = tuple(_named(name, suffix) for name in entry.names)
            reader = ServedReader(matrix, suffix)
            yield NamedTensor(names, local, shards.get(suffix), computed=reader)

    def _check_siblings(self) -> None:
        """Raise ConfigError, by name, if another rank may hold a matrix that shares a scale."""
        here = {matrix.name for matrix in self._matrices}
        for name, names in self._parts.items():
            if lacking := sorted(set(names) - here):
                raise ConfigError(
                    f"{name}: it shares its scale with {lacking[0]}, of which this rank holds "
                    "nothing; gather them, see StreamedWeights, or leave what the model lacks out "
                    "of `fused`"
                )


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
    """Raise ConfigError, by name, unless the part of a matrix that is held is quantized alone."""
    rows, cols = held.shape if len(held.shape) == 2 else (0, 0)
    borders = held.offset[0], held.offset[0] + held.size[0]
    if (
        held.size[1:] != (cols,)
        or not all(border % form.rows == 0 or border == rows for border in borders)
        or any(p.rows is None and p.elements is None for p in form.parts((rows, cols)).values())
    ):
        raise ConfigError(
            f"{entry.name}: this rank holds {held.size} at {held.offset} of {held.shape}; what a "
            f"rank holds must be quantized alone, and {form.name} is made of whole rows, of "
            f"{form.rows} together or of all; gather them, see StreamedWeights"
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
    return f"{name.removesuffix(_WEIGHT)}.{suffix}"


class Matrix:
    """A matrix of the trainer and its form.

    Attributes:
        name: Of the weight.
        shape: (rows, cols).
        form: How it is served.
        parts: What is served of it.
    """

    def __init__(
        self,
        tensor: Tensor,
        form: Form,
        *,
        name: str,
        shape: tuple[int, ...] | None = None,
        shared: Shared | None = None,
    ) -> None:
        """`tensor` is not owned; `shape` is what its elements are seen as, if not in its own.

        Raises ConfigError, by name, if it is no matrix of this form.
        """
        shape = tuple(tensor.shape) if shape is None else shape
        if len(shape) != 2 or not name.endswith(_WEIGHT):
            raise ConfigError(
                f"{name}: {form.name} is for matrices that are called *.weight, and this has shape "
                f"{shape}; split stacked ones by `name_map`"
            )
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"{name}: {form.name} is made of bfloat16 or float32, and this is {tensor.dtype}; "
                "give the weights that the trainer trains"
            )
        rows, cols = shape
        self.name, self.shape, self.form = name, (rows, cols), form
        try:
            self.parts = form.parts(self.shape)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        self._reader = WireReader.of(tensor, _BFLOAT16, name=name)
        self._scales: Flat | None = None  # what kernels compute
        self.share(Shared(form) if shared is None else shared)

    def lies_in(self, held: ShardSpec) -> dict[str, ShardSpec]:
        """Where the parts lie, if this is only the rows `held` of a matrix.

        What the form says of the shape is then said of that of the whole matrix.
        """
        rows, cols = held.shape
        full, shards = self.form.parts((rows, cols)), {}
        for suffix, part in full.items():
            if part.rows is None:
                shards[suffix] = ShardSpec.whole(part.shape)
                continue
            begin = min(-(-held.offset[0] // part.rows), part.shape[0])
            offset = (begin, *(0 for _ in part.shape[1:]))
            shards[suffix] = ShardSpec(part.shape, offset, self.parts[suffix].shape)
        self.parts = {
            suffix: part if full[suffix].rows is not None else full[suffix]
            for suffix, part in self.parts.items()
        }
        return shards

    def share(self, shared: Shared) -> None:
        """Have the parts of the whole in common with the other matrices of `shared`."""
        self._shared = shared
        shared.add(self._weight)

    def copy(self) -> Matrix:
        """The same, in memory of its own."""
        return Matrix(self._weight().clone(), self.form, name=self.name)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._reader.device

    def changed(self) -> None:
        """Forget what was computed: the trainer has made a step."""
        self._shared.changed()

    def check(self) -> None:
        """Raise ConfigError, by name, if its bfloat16 rounding is not finite, or has no scale."""
        rows, cols = self.shape
        step = max(1, _CHECKED // max(1, cols))
        for start in range(0, rows, step):
            if not self._band(start, min(start + step, rows)).isfinite().all():
                raise ConfigError(
                    f"{self.name}: NaN or infinity has no {self.form.name}; restore the weights "
                    "before engines connect"
                )
        for suffix, part in self._shared.parts().items():
            if suffix in self.parts and not (part.isfinite() & (part != 0)).all():
                raise ConfigError(
                    f"{self.name}: a matrix of zeros has no {self.form.name}; serve it as it is"
                )

    def computation(self, suffix: str) -> Computation | None:
        """How kernels compute one part. They read the weight itself: float32 or bfloat16."""
        if not isinstance(self.form, BlockFp8) or self.form.arithmetic != "deepgemm":
            return None
        if self._scales is None:
            shape = self.parts["weight_scale_inv"].shape
            self._scales = Flat.of(torch.empty(shape, dtype=torch.float32, device=self.device))
        return Computation(
            self._reader.flat,
            self._scales,
            self.shape,
            is_ue8m0=self.form.scale == "ue8m0",
            is_scales=suffix == "weight_scale_inv",
        )

    def served(self, suffix: str) -> Tensor:
        """[*shape] of one part, in memory of its own."""
        part, reader = self.parts[suffix], ServedReader(self, suffix)
        return reader.read(0, reader.numel).clone().view(torch_dtype(part.dtype)).view(part.shape)

    def rows_of(self, suffix: str, start: int, stop: int) -> Tensor:
        """[stop - start, ...]: rows of one part, or all of it if it is of the whole matrix."""
        part, step, whole = self.parts[suffix], self.form.rows, self._shared.parts()
        if part.elements is not None:
            dtype = torch_dtype(part.dtype)
            return torch.tensor(part.elements, dtype=dtype, device=self.device).view(part.shape)
        if part.rows is None:
            return whole[suffix]
        first = start * part.rows // step * step
        last = -(-stop * part.rows // step) * step
        band = self._band(first, min(last, self.shape[0]))
        begin = first // part.rows
        return self.form.quantize(band, whole)[suffix][start - begin : stop - begin]

    def _weight(self) -> Tensor:
        """[rows, cols] bfloat16."""
        return self._band(0, self.shape[0])

    def _band(self, start: int, stop: int) -> Tensor:
        """[stop - start, cols] bfloat16: rows of the weight."""
        cols = self.shape[1]
        bits = self._reader.read(start * cols, stop * cols)
        return bits.view(torch.bfloat16).view(stop - start, cols)


@dataclass(frozen=True, slots=True)
class ServedReader:
    """Reads one part of a matrix, quantizing the rows that it is asked for.

    Attributes:
        matrix: What it is computed from.
        suffix: Which part.
    """

    matrix: Matrix
    suffix: str

    @property
    def flat(self) -> Flat | None:
        """None: it is computed."""
        return None

    @property
    def dtype(self) -> Dtype:
        return self.matrix.parts[self.suffix].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.parts[self.suffix].shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def computation(self) -> Computation | None:
        return self.matrix.computation(self.suffix)

    def read(self, start: int, stop: int) -> Tensor:
        """int[stop - start]: the bits there; read only."""
        if start == stop:
            return torch.empty(0, dtype=integer_dtype(self.dtype), device=self.device)
        if self.matrix.parts[self.suffix].rows is None:
            rows, begin = self.matrix.rows_of(self.suffix, 0, 0), 0
        else:
            length = prod(self.shape[1:])
            first, last = start // length, -(-stop // length)
            rows, begin = self.matrix.rows_of(self.suffix, first, last), first * length
        return as_bits(rows.contiguous()).view(-1)[start - begin : stop - begin]

    def check(self) -> None:
        """Raise ConfigError, by name, if the matrix is not finite: its first part says so."""
        if self.suffix == next(iter(self.matrix.parts)):
            self.matrix.check()
