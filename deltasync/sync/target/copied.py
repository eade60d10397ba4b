"""A target for who wants the trainer's weights themselves: a copy of whatever is sent."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, torch_dtype
from deltasync.errors import ConfigError
from deltasync.sync.target.base import WeightTarget
from deltasync.wire.messages import ParameterSpec

_ALIGNMENT = 64  # bytes


class CopiedTarget(WeightTarget):
    """Holds every parameter that the sender has, in memory of its own.

    It says nothing of what it holds, and takes names, shapes and dtypes as they are sent; so it is
    for an engine of one rank. A parameter that keeps its shape and dtype keeps its memory.

    Args:
        device: Where the copy is kept.
        path: A file that keeps it instead, and is mapped; whatever it holds of the right length is
            taken for an earlier copy, which digests judge. One target at a time may use it.

    Attributes:
        tensors: The copy by name, tied ones under each name. Read only; written in each sync.
    """

    def __init__(
        self, *, device: torch.device | str = "cpu", path: str | Path | None = None
    ) -> None:
        self._device = torch.device(device)
        self._file = None if path is None else _File(Path(path))
        if self._file is not None and self._device.type != "cpu":
            raise ConfigError(f"a file is mapped to host memory: it cannot be on {device}")
        self.tensors: Mapping[str, Tensor] = {}

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """None: all that the sender has will do."""
        return ()

    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        """Have memory for each parameter. What the layout does not name is let go.

        Raises ConfigError if the file cannot be made, as on a full disk, or is not this user's.
        """
        known, tensors = self.tensors, dict[str, Tensor]()
        places = None if self._file is None else self._file.places(layout)
        flats: dict[int, Flat] = {}
        for number, spec in enumerate(layout):
            tensor = self._memory(spec, known.get(spec.name)) if places is None else places[number]
            tensors.update(dict.fromkeys(spec.names, tensor))
            flats[number] = Flat.of(tensor, name=spec.name)
        self.tensors = tensors
        return flats

    def close(self) -> None:
        """Let another target use the file, if there is one. Nothing may be written here then."""
        if self._file is not None:
            self._file.close()

    def check_unmoved(self) -> None:
        """The copy stays where it is."""

    def finish(self, changed: Collection[int] | None = None) -> None:
        """Nothing is derived."""

    def _memory(self, spec: ParameterSpec, held: Tensor | None) -> Tensor:
        dtype = torch_dtype(spec.dtype)
        if held is not None and (tuple(held.shape), held.dtype) == (spec.shape, dtype):
            return held
        return torch.empty(spec.shape, dtype=dtype, device=self._device)


class _File:
    """One file for all parameters, one after another, mapped and shared."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._closing: finalize[[int], _File] | None = None  # of the descriptor that has the lock

    def places(self, layout: Sequence[ParameterSpec]) -> list[Tensor]:
        """Where each parameter lies. A file of another length is replaced."""
        sizes = [spec.numel * spec.dtype.item_size for spec in layout]
        begins = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        if len(self._memory) != begins[-1]:
            self._memory = self._mapped(begins[-1])
        return [
            self._memory[begin : begin + size].view(torch_dtype(spec.dtype)).view(spec.shape)
            for spec, begin, size in zip(layout, begins, sizes, strict=False)
        ]

    def _mapped(self, num_bytes: int) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            self._open(num_bytes)
        except BlockingIOError:
            raise ConfigError(f"{self._path}: another process, or relay, uses it") from None
        except OSError as error:
            raise ConfigError(
                f"{self._path}: {error.strerror or error}; the copy takes {num_bytes} bytes"
            ) from error
        return torch.from_file(str(self._path), shared=True, size=num_bytes, dtype=torch.uint8)

    def _open(self, num_bytes: int) -> None:
        """Lock the file until `close`; replace one of another length."""
        descriptor = self._locked(os.O_RDWR | os.O_CREAT)
        if os.fstat(descriptor).st_size != num_bytes:
            self._path.unlink()  # what is mapped stays
            descriptor = self._locked(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:  # all of its blocks, so that no write to the mapping fails
                os.posix_fallocate(descriptor, 0, num_bytes)
            except OSError:
                self._path.unlink()
                raise

    def _locked(self, flags: int) -> int:
        """Open it and let go of the file before."""
        self.close()
        descriptor = os.open(self._path, flags, 0o600)
        self._closing = finalize(self, os.close, descriptor)
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise ConfigError(
                f"{self._path}: not a regular file, or one of another user, who could read and "
                "change the copy: name another file"
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def close(self) -> None:
        """Let go of the lock."""
        if self._closing is not None:
            self._closing()
