"""What a served form is: the tensors that an engine keeps of a matrix, and how they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError
from deltasync.quant.computation import KernelForm

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that an engine keeps of a matrix.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        rows: Rows of the matrix that one row of it stands for; None if it is of the whole matrix.
        cols: Columns of the matrix that one column of it stands for.
        elements: Its integers, if the shape of the matrix alone determines them.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    rows: int | None
    cols: int = 1
    elements: tuple[int, ...] | None = None


class Form(Protocol):
    """How an engine keeps matrices: codes of few bits, and scales.

    A form computes exactly what the engine's own functions do, operation by operation, so that a
    matrix that arrives by deltas has the bits of one that the engine has loaded.

    Attributes:
        name: What it is called in messages.
        rows: Rows that are quantized together. Blocks never reach across a multiple of it.
        cols: The same for columns; None for all columns of the matrix.
        shares: Whether matrices that an engine fuses have the result of `whole` in common.
    """

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> int:
        return 1

    @property
    def cols(self) -> int | None: ...

    @property
    def shares(self) -> bool:
        return False

    @property
    def kernel(self) -> KernelForm | None:
        """How kernels compute it; None if they do not, and bands of it are computed one by one."""
        ...

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        """What is kept of a matrix, by what follows the layer's name: "weight", "weight_scale".

        The codes come first.

        Raises ConfigError if matrices of this shape cannot be kept in this form.
        """
        ...

    def whole(self, peak: Tensor) -> Mapping[str, Tensor]:
        """The part that depends on whole matrices; nothing, unless the form `shares`.

        Args:
            peak: bfloat16[1], the largest magnitude in all matrices that share it, or NaN.
        """
        return {}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The other parts, of some rows.

        Apart from `whole`, an element's code depends on nothing but the element, and the largest
        magnitude of its block of `rows` x `cols`; a block's scale on that magnitude alone.

        Args:
            band: [n, cols] bfloat16, rows of the matrix that begin at a multiple of `rows`, and end
                at one or at its end.
            whole: What `whole` has returned.
        """
        ...


def check_choice(form: str, choice: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError if a choice is none of those known."""
    if choice not in known:
        raise ConfigError(f"{form}: {choice!r} is not known; choose one of {sorted(known)}")


def check_columns(shape: Shape, block: int, form: str) -> None:
    """Raises ConfigError if rows of a matrix do not consist of whole blocks."""
    if 0 in shape or shape[1] % block:
        raise ConfigError(
            f"{form} is for blocks of {block} in a row, and the shape is {shape}; leave it out of "
            "the forms, as the engine's quantization_config must"
        )
