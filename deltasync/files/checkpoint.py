"""Checkpoints in safetensors, one file or a folder: tensors by name, read on first access."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import torch_dtype
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError, LayoutMismatch
from deltasync.files.frame_file import check_regular
from deltasync.sync.target.base import some_of
from deltasync.wire.messages import ParameterSpec, limit_broken

INDEX = "model.safetensors.index.json"
_SHOWN = 80  # characters of a name that may be of any length
_PICKLED, _ZIP = {".bin", ".pt", ".pth", ".ckpt"}, b"PK\x03\x04"
_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")  # of pickles, after "\x80"
_CONVERT = (
    "deltasync unpickles nothing, convert it: "
    "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
)
_LENGTH_BYTES = 8  # a file begins with the length of its header
SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}


class Checkpoint:
    """The tensors of a checkpoint by name. Files are mapped: only what is accessed is read.

    Args:
        path: A safetensors file, or a folder: with `model.safetensors.index.json` the files that
            it names, otherwise every `*.safetensors` in it.
        writable: Whether what is written into tensors goes to the files.

    Attributes:
        path: As given.
        files: The files that hold the tensors.
        specs: Name, shape and dtype of each tensor, by name, in the order of the files.

    Raises:
        ConfigError: It is no checkpoint, a file is damaged or cannot be read, or safetensors is not
            installed.
    """

    def __init__(self, path: str | Path, *, writable: bool = False) -> None:
        self.path = Path(path)
        chosen = _chosen(self.path)
        self.files = tuple(dict.fromkeys(chosen.values())) if chosen else _all_files(self.path)
        self.specs: dict[str, ParameterSpec] = {}
        self._places: dict[str, tuple[mmap.mmap, int]] = {}  # the mapping, and where it begins
        self._memories: list[mmap.mmap] = []
        for file in self.files:
            memory = _mapped(file, writable=writable)
            self._memories.append(memory)
            for spec, offset in _tensors(file, memory):
                if chosen and chosen.get(spec.name) != file:
                    continue
                if spec.name in self.specs:
                    raise ConfigError(f"{self.path}: two files hold {spec.name!r}; add {INDEX}")
                self.specs[spec.name] = spec
                self._places[spec.name] = memory, offset
        if missing := [name for name in chosen if name not in self.specs]:
            raise ConfigError(f"{self.path}: {INDEX} names {some_of(missing)}, no file holds it")

    @property
    def layout(self) -> tuple[ParameterSpec, ...]:
        """All specs."""
        return tuple(self.specs.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.numel * spec.dtype.item_size for spec in self.specs.values())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as a view of its file. Writes stay in memory unless it is `writable`.

        Raises KeyError for a name that is not in `specs`.
        """
        spec, (memory, offset) = self.specs[name], self._places[name]
        if not spec.numel:
            return torch.empty(0, dtype=torch_dtype(spec.dtype), device="cpu").view(spec.shape)
        count = spec.numel * spec.dtype.item_size
        data = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=offset)
        return data.view(torch_dtype(spec.dtype)).view(spec.shape)

    def release(self) -> None:
        """Release the memory that tensors were read into; the next access reads them again.

        What was written into them is lost, unless it is `writable`.
        """
        for memory in self._memories:
            memory.madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Wait until what was written is on disk."""
        for memory in self._memories:
            memory.flush()


def check_same_tensors(
    old: Mapping[str, ParameterSpec],
    new: Mapping[str, ParameterSpec],
    *,
    called: tuple[str, str] = ("the first", "the second"),
) -> None:
    """Raise LayoutMismatch, with the first few names, if names, shapes or dtypes differ."""
    for one, other, which in ((old, new, called[0]), (new, old, called[1])):
        if only := [name for name in one if name not in other]:
            raise LayoutMismatch(f"only {which} has {some_of(only)}")
    shown: dict[str, Callable[[ParameterSpec], str]] = {
        "shape": lambda spec: str(list(spec.shape)),
        "dtype": lambda spec: spec.dtype.name,
    }
    for what, text_of in shown.items():
        if wrong := [name for name in old if text_of(old[name]) != text_of(new[name])]:
            first, second = (text_of(specs[wrong[0]]) for specs in (old, new))
            raise LayoutMismatch(
                f"{what} of {some_of(wrong)} differs: {first} in {called[0]}, {second} in "
                f"{called[1]}"
            )


def _chosen(path: Path) -> dict[str, Path]:
    """The file of each tensor that a folder's index names; empty without one."""
    index = path / INDEX
    if not index.is_file():
        return {}
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        chosen = {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index}: not an index of safetensors files") from error
    if odd := [file for file in chosen.values() if Path(file).name != file]:
        raise ConfigError(f"{index}: {odd[0]!r} is no file of this folder")
    return {name: path / file for name, file in chosen.items()}


def _all_files(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    if files := tuple(sorted(path.glob("*.safetensors"))):
        return files
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    why = f": {pickled[0]} is a pickle; {_CONVERT}" if pickled else ""
    raise ConfigError(f"{path}: a folder without safetensors files{why}")


def _mapped(file: Path, *, writable: bool) -> mmap.mmap:
    try:
        check_regular(file)
        descriptor = os.open(file, os.O_RDWR if writable else os.O_RDONLY)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
            return mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except ValueError:  # an empty file
        raise ConfigError(f"{file}: not a safetensors file: it is empty") from None


def _tensors(file: Path, memory: mmap.mmap) -> Iterator[tuple[ParameterSpec, int]]:
    """(spec, offset) of each tensor of a file, as it lies there.

    safetensors refuses a header whose tensors do not follow each other without gaps, so the sizes
    tell where each begins.
    """
    # Empty tensors may be anywhere, in an order that changes with each read.
    entries = sorted(_header(file), key=lambda entry: (0 in entry[2], entry[0] * (0 in entry[2])))
    offset = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
    for name, dtype, shape in entries:
        spec = ParameterSpec((name,), shape, dtype)
        if (fault := limit_broken(spec)) is not None:
            raise ConfigError(f"{file}: {name[:_SHOWN]!r}: {fault}")
        yield spec, offset
        offset += prod(shape) * dtype.item_size
    if offset != len(memory):
        raise ConfigError(f"{file}: tensors end at byte {offset}, the file at {len(memory)}")


def _header(file: Path) -> Iterable[tuple[str, Dtype, tuple[int, ...]]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ConfigError("checkpoints are read by safetensors: pip install safetensors") from None
    try:
        with safe_open(file, "np") as opened:  # torch would map it once more
            for name in opened.offset_keys():
                entry = opened.get_slice(name)
                yield name, _dtype_of(file, name, entry.get_dtype()), tuple(entry.get_shape())
    except (SafetensorError, OSError) as error:
        if _is_pickle(file):
            raise ConfigError(f"{file}: a pickle, as torch.save writes it; {_CONVERT}") from None
        raise ConfigError(f"{file}: not a safetensors file, or damaged: {error}") from error


def _is_pickle(file: Path) -> bool:
    """Whether a file that is not safetensors looks like, or is named like, one of torch.save."""
    with file.open("rb") as opened:
        begin = opened.read(_LENGTH_BYTES + 1)
    if begin[_LENGTH_BYTES:] == b"{":  # a damaged header of safetensors
        return False
    is_protocol = begin[:1] == b"\x80" and begin[1:2] in _PROTOCOLS
    return file.suffix in _PICKLED or begin.startswith(_ZIP) or is_protocol


def _dtype_of(file: Path, name: str, dtype: str) -> Dtype:
    try:
        return dtypes.BY_NAME[SAFETENSORS_DTYPES[dtype]]
    except KeyError:
        raise ConfigError(f"{file}: {name!r} is {dtype}, which deltasync does not send") from None
