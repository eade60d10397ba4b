"""Matrices that are sent quantized: one kernel reads, quantizes and compares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Flat
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.delta.launches import there
from deltasync.delta.tiles import Ints
from deltasync.quant import reads, triton_forms, triton_quantize
from deltasync.quant.computation import Computation, KernelForm, Total
from deltasync.wire.changes import ALIGNMENT

WORD = 32  # elements whose masks are one word
_SIDE = 128
_MAX_ROWS, _MAX_COLS = 1 << 31, (1 << 31) // _SIDE  # int32 counts rows, and the weights of 128
_SPAN, _ROW_SPAN = triton_quantize.SPAN, triton_quantize.SPAN // 2


def can_compute(computation: Computation, device: torch.device) -> bool:
    """Whether there are kernels for a matrix of this shape, and they can read it on `device`."""
    (rows, cols), codes = computation.shape, reads.codes_of(computation.form.number)
    match computation.form.block:
        case None, None:
            fits = True
        case 1, None:
            fits = cols % (WORD * codes) == 0
        case 1, int(group):
            fits = group & (group - 1) == 0 and codes <= group <= _SPAN
        case block:
            fits = block == (_SIDE, _SIDE) and cols % WORD == 0
            fits = fits and rows < _MAX_ROWS and cols < _MAX_COLS
    weights = [computation.weight]
    if computation.total is not None:
        weights += computation.total.weights
    return fits and all(one.is_contiguous and one.line.device == device for one in weights)


class Totals:
    """Scales of whole matrices, which are computed before those of blocks.

    Attributes:
        values: float32[n, 4] on the device: the first one of each row.
    """

    def __init__(self, form: KernelForm, totals: Sequence[Total], device: torch.device) -> None:
        """Those of one form."""
        self._form, self._numbers = form, {id(one): nth for nth, one in enumerate(totals)}
        self.values = torch.empty((len(totals), 4), dtype=torch.float32, device=device)
        self._peaks = torch.zeros(len(totals), dtype=torch.int32, device=device)
        self._launches: list[tuple[Tensor, Tensor, bool, bool]] = []
        kinds: dict[tuple[bool, bool], list[tuple[int, int, int]]] = {}
        for nth, total in enumerate(totals):
            for weight in total.weights:
                address, numel = weight.line.data_ptr(), weight.numel
                kind = _is_wide(weight), (address | numel) % ALIGNMENT == 0
                kinds.setdefault(kind, []).append((address, numel, nth))
        for (is_wide, is_aligned), members in kinds.items():
            addresses, numels, places = np.array(members, np.int64).T
            table, matrix_of = _programs([addresses, numels], [places], -(-numels // _SPAN), device)
            self._launches.append((table, matrix_of, is_wide, is_aligned))

    def address(self, total: Total) -> int:
        """Where the value of one stands; 0 if it is not computed here."""
        number = self._numbers.get(id(total))
        return 0 if number is None else self.values[number].data_ptr()

    def compute(self) -> None:
        """Of the weights as they are now."""
        self._peaks.zero_()
        for table, matrix_of, is_wide, is_aligned in self._launches:
            triton_quantize.find_peaks[(len(matrix_of),)](
                table,
                matrix_of,
                self._peaks,
                table.shape[1],
                SPAN=_SPAN,
                WIDE=is_wide,
                ALIGNED=is_aligned,
                num_warps=4,
            )
        assert self._form.total_of is not None
        peaks = self._peaks.to(torch.int16).view(torch.bfloat16)
        self.values[:, 0] = self._form.total_of(peaks)


@dataclass(frozen=True, slots=True)
class Matrices:
    """Those that one launch compares.

    Attributes:
        form: What they are quantized to.
        read: How their weights are read.
        is_aligned: Weights and codes begin at multiples of 16 bytes, and have so many elements.
        table: int64[8, matrices] on the device, see `triton_quantize`.
        matrix_of: int32[programs] on the device: the matrix of each.
    """

    form: KernelForm
    read: int
    is_aligned: bool
    table: Tensor
    matrix_of: Tensor

    def compare(self, words: Tensor) -> None:
        """Compute all scales, and write masks of the codes that differ to int32[...] words."""
        codes = reads.codes_of(self.form.number)
        shape: dict[str, object] = {"TYPE": TYPES[4 if codes == 8 else 1], "CODES": codes}
        match self.form.block:
            case 1, None:
                kernel, shape["SPAN"] = triton_quantize.compare_rows, _ROW_SPAN
            case ((1 | None), group):
                kernel = triton_quantize.compare_groups
                shape |= {"SPAN": _SPAN, "GROUP": group or 0}
            case _:
                kernel, shape = triton_quantize.compare_squares, {}
        kernel[(len(self.matrix_of),)](
            self.table,
            self.matrix_of,
            words,
            self.table.shape[1],
            FORM=self.form.number,
            WIDE=bool(self.read & reads.WIDE),
            ALIGNED=self.is_aligned,
            num_warps=4 if shape else 8,
            enable_fp_fusion=False,
            **shape,
        )


class Quantized:
    """All matrices of a source that kernels quantize.

    Attributes:
        totals: Scales of whole matrices, by form.
        matrices: By what one launch compares.
    """

    codes_at = triton_forms.codes_at

    def __init__(self, codes: Mapping[int, Computation], device: torch.device) -> None:
        """`codes`: how those are computed, by share."""
        self._codes, self._device = codes, device
        found: dict[KernelForm, dict[int, Total]] = {}
        for one in codes.values():
            if one.total is not None:
                found.setdefault(one.form, {})[id(one.total)] = one.total
        self.totals = {
            form: Totals(form, list(totals.values()), device) for form, totals in found.items()
        }
        self.matrices: list[Matrices] = []
        self._scales = {
            one.scales.line.data_ptr() for one in codes.values() if one.scales is not None
        }

    def source_of(self, computation: Computation) -> tuple[int, bool] | None:
        """(address, whether it is float32) of scales; None if kernels do not compute them."""
        if computation.part == "scales" and computation.scales is not None:
            address = computation.scales.line.data_ptr()
            is_wide = computation.scales.tensor.dtype == torch.float32
            return (address, is_wide) if address in self._scales else None
        address = self._total(computation)
        return (address, True) if address and computation.part == "total" else None

    def compare(self, words: Tensor) -> None:
        """Compute all scales, and write masks of the codes that differ to int32[...] words."""
        for totals in self.totals.values():
            totals.compute()
        for matrices in self.matrices:
            matrices.compare(words)

    def columns(self, num_shares: int) -> Ints:
        """int64[shares, 3]: as `triton_forms.codes_at` takes them."""
        columns = np.zeros((num_shares, 3), np.int64)
        columns[:, 1] = 1
        for share, one in self._codes.items():
            total, group = self._total(one), one.form.block[1]
            scales = total if one.scales is None else one.scales.line.data_ptr()
            if one.form.block[0] != 1:
                group = one.shape[0] * one.shape[1] if one.scales is None else None
            columns[share] = scales, group or one.shape[1], total
        return columns

    def place(self, reads_of: Ints, at: Ints, first_word: Ints) -> None:
        """Say what codes are compared with.

        Args:
            reads_of: int64[shares], how kernels read them.
            at: int64[shares], addresses of what they are compared with.
            first_word: int64[shares], where their masks begin.
        """
        kinds: dict[tuple[KernelForm, int, bool], list[int]] = {}
        for share, one in self._codes.items():
            numel = one.shape[0] * one.shape[1] // reads.codes_of(one.form.number)
            places = one.weight.line.data_ptr() | int(at[share]) | numel
            kind = one.form, int(reads_of[share]), places % ALIGNMENT == 0
            kinds.setdefault(kind, []).append(share)
        self.matrices = [
            Matrices(*kind, *self._table(kind[0], np.array(here), at, first_word))
            for kind, here in kinds.items()
        ]

    def _table(
        self, form: KernelForm, shares: Ints, at: Ints, first_word: Ints
    ) -> tuple[Tensor, Tensor]:
        codes = [self._codes[share] for share in shares.tolist()]
        rows, cols = np.array([one.shape for one in codes], np.int64).T
        match form.block:
            case 1, None:
                programs = rows
            case ((1 | None), _):
                programs = -(-rows * cols // _SPAN)
            case _:
                programs = -(-rows // _SIDE) * -(-cols // _SIDE)
        scales = [0 if one.scales is None else one.scales.line.data_ptr() for one in codes]
        before = [
            _column(one.weight.line.data_ptr() for one in codes),
            at[shares],
            _column(scales),
            rows,
            cols,
            first_word[shares],
        ]
        return _programs(before, [_column(map(self._total, codes))], programs, self._device)

    def _total(self, computation: Computation) -> int:
        """Where the scale of the whole stands; 0 if there is none."""
        totals = self.totals.get(computation.form)
        if totals is None or computation.total is None:
            return 0
        return totals.address(computation.total)


def _column(numbers: Iterable[int]) -> Ints:
    return np.array(list(numbers), np.int64)


def _programs(
    before: list[Ints], after: list[Ints], counts: Ints, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A table on the device, with the first programs between two lists of rows; whose each is."""
    table = np.stack([*before, np.cumsum(counts) - counts, *after])
    whose = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return there(table, device), there(whose, device)


def _is_wide(weight: Flat) -> bool:
    return weight.tensor.dtype == torch.float32
