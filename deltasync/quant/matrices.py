"""Matrices of a trainer and the readers of what is served of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta import readers
from deltasync.delta.bits import Flat, as_bits, integer_dtype, torch_dtype
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.shard import ShardSpec, rows_of
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError
from deltasync.quant.computation import Computation
from deltasync.quant.cuts import Cut, Line
from deltasync.quant.form import Form, Part
from deltasync.quant.sharing import Shared
from deltasync.sync.source.tensors import Index, Maxima, Place
from deltasync.wire.messages import ParameterSpec

WEIGHT = ".weight"

_BFLOAT16 = dtypes.BY_NAME["bfloat16"]
_CHECKED = 1 << 22  # elements looked at at once


class Matrix:
    """A matrix of the trainer and its form.

    Attributes:
        name: Of the weight.
        shape: (rows, cols) of it, or of what is held of it here.
        form: How it is served.
        parts: What is served of it; only what is made here, if only a part of it is held.
        shards: Where those lie, if only a part of it is held.
    """

    def __init__(
        self,
        tensor: Tensor,
        form: Form,
        *,
        name: str,
        held: ShardSpec | None = None,
        shared: Shared | None = None,
    ) -> None:
        """`tensor` is not owned; `held` is what it is, if not a matrix of its own shape.

        Raises ConfigError, by name, if it is no matrix of this form.
        """
        held = ShardSpec.whole(tensor.shape) if held is None else held
        shape = held.shape
        if len(shape) != 2 or not name.endswith(WEIGHT):
            raise ConfigError(
                f"{name}: {form.name} is for matrices that are called *.weight, and this has shape "
                f"{shape}; split stacked ones by `name_map`"
            )
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"{name}: {form.name} is made of bfloat16 or float32, and this is {tensor.dtype}; "
                "give the weights that the trainer trains"
            )
        self.name, self.shape, self.form = name, (held.size[0], held.size[1]), form
        self.parts, self.shards = dict[str, Part](), dict[str, ShardSpec]()
        self._cut: Cut | None = None
        try:
            if held.size == held.shape:
                self.parts.update(form.parts(self.shape))
            else:
                self._take(Cut(held, form))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        self._reader = WireReader.of(tensor, _BFLOAT16, name=name)
        self._scales: Flat | None = None  # what kernels compute
        self._constants: dict[str, Flat] = {}
        self.share(Shared(form) if shared is None else shared)

    def _take(self, cut: Cut) -> None:
        """Quantize only what is held."""
        self._cut = cut
        for suffix, part, shard in cut.shards():
            self.parts[suffix], self.shards[suffix] = replace(part, shape=shard.size), shard

    def share(self, shared: Shared) -> None:
        """Have the parts of the whole in common with the other matrices of `shared`."""
        self._shared = shared
        shared.add(self._weight, self._reader.flat, is_part=self._cut is not None)

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
        if self._cut is not None:
            self._cut.forget()

    def maxima(self) -> list[Maxima]:
        """What it takes of other ranks, if they hold parts of it, or of what shares its scales."""
        found = [] if not self.form.shares else [self._shared.maxima(self.device)]
        if (cut := self._cut) is not None:
            found += (self._maxima_of(cut, line) for line in cut.lines)
        return found

    def _maxima_of(self, cut: Cut, line: Line) -> Maxima:
        along = cut.along(line)
        name = f"{self.name}/{'columns' if line[0] else 'rows'}/{line[1]}"
        here = along.blocks
        return Maxima(
            Place(name, along.all_blocks, here.start, len(here), crosses=True),
            self.device,
            own=lambda: cut.peaks(line, self._band),
            agree=lambda peaks: cut.agree(line, peaks),
        )

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
        form = self.form.kernel
        if form is None or suffix not in (form.codes, form.scales, form.total):
            return None
        total = None if form.total is None else self._shared.total
        if (form.total is not None and total is None) or (
            self._cut is not None and self._cut.lines
        ):
            return None
        return Computation.of(
            self._reader.flat,
            self.shape,
            form,
            part=(
                "codes" if suffix == form.codes else "scales" if suffix == form.scales else "total"
            ),
            scales=None if form.scales is None else self._kept(form.scales),
            total=total,
        )

    def constant(self, suffix: str) -> Flat | None:
        """A part that the shape alone determines."""
        part = self.parts[suffix]
        if part.elements is not None and suffix not in self._constants:
            self._constants[suffix] = Flat.of(self.rows_of(suffix, 0, 0))
        return self._constants.get(suffix)

    def _kept(self, suffix: str) -> Flat:
        """Scales as kernels write them: in the part's dtype if it is of a byte, else as float32."""
        if self._scales is None:
            part = self.parts[suffix]
            dtype = torch.float32 if part.dtype.item_size > 1 else torch_dtype(part.dtype)
            self._scales = Flat.of(torch.empty(part.shape, dtype=dtype, device=self.device))
        return self._scales

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
        if self._cut is not None:
            return self._cut.rows_of(suffix, start, stop, self._band, whole)
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
        """None if it is computed of the weights."""
        return self.matrix.constant(self.suffix)

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

    def sent(
        self, spec: ParameterSpec, part: tuple[ShardSpec, ShardSpec] | None = None
    ) -> list[Reader]:
        """See `Computed`: bfloat16 is sent as float32 too, as scales of checkpoints are."""
        whole: Reader = self
        if (self.dtype.name, spec.dtype.name) == ("bfloat16", "float32"):
            whole = _DerivedReader(self, spec.dtype, 0, self.numel)
        elif self.dtype != spec.dtype:
            raise ConfigError(
                f"{spec.name}: computed as {self.dtype.name}, the engine holds {spec.dtype.name}: "
                "let the trainer compute the form that the engine serves"
            )
        if part is None:
            return [whole]
        return [_rows(whole, *part, index) for index, _ in rows_of(part[1])]

    def maxima(self) -> Sequence[Maxima]:
        """What the matrix takes of other ranks: its first part says so."""
        return self.matrix.maxima() if self.suffix == next(iter(self.matrix.parts)) else ()

    def check(self) -> None:
        """Raise ConfigError, by name, if the matrix is not finite: its first part says so."""
        if self.suffix == next(iter(self.matrix.parts)):
            self.matrix.check()


@dataclass(frozen=True, slots=True)
class _DerivedReader:
    """Reads a run of what another one computes; bfloat16 as float32, which has all of its values.

    Attributes:
        whole: The other one.
        dtype: What is sent, float32 or the same.
        begin: Where the run begins in it.
        numel: Its elements.
    """

    whole: Reader
    dtype: Dtype
    begin: int
    numel: int
    flat: None = None

    @property
    def computation(self) -> readers.Computation | None:
        """That of the other one, if this is all of it: kernels keep scales as float32."""
        return self.whole.computation if self.numel == self.whole.numel else None

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def read(self, start: int, stop: int) -> Tensor:
        """int[stop - start]: bits of the wire dtype there; read only."""
        bits = self.whole.read(self.begin + start, self.begin + stop)
        return bits if self.dtype == self.whole.dtype else bits.to(torch.int32) << 16


def _rows(whole: Reader, held: ShardSpec, box: ShardSpec, index: Index) -> Reader:
    """What is computed of `box[index]`, see `rows_of`: rows of what is held.

    Raises ConfigError for a part of rows.
    """
    if box == held and not index:
        return whole
    if box.size[1:] != held.size[1:]:
        raise ConfigError("computed rows are sent whole: let fewer ranks hold the same rows")
    rows = range(box.size[0])[index[0]] if index else range(box.size[0])
    rows = range(rows, rows + 1) if isinstance(rows, int) else rows
    length, first = prod(held.size[1:]), box.offset[0] - held.offset[0]
    begin = (first + rows.start) * length
    return _DerivedReader(whole, whole.dtype, begin, len(rows) * length)
