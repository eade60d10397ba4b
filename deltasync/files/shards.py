"""Plain safetensors of weights that are read piece by piece: no tensor has to be in host memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.files.checkpoint import INDEX, SAFETENSORS_DTYPES
from deltasync.wire.messages import ParameterSpec

_PIECE_BYTES = 16 << 20
_ALIGNMENT = 8
_METADATA = "__metadata__"
_NAMES = {name: text for text, name in SAFETENSORS_DTYPES.items()}

ReadBits = Callable[[int, int, int], Tensor]
"""(parameter, start, stop) -> int[stop - start], bits of consecutive elements, on any device."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint: tensors in safetensors, or the index of such files.

    Attributes:
        name: Of the file.
        numbers: The parameters in it, by their place in the layout, in the order of the file; none
            in an index.
        header: The bytes before the tensors.
    """

    name: str
    numbers: tuple[int, ...]
    header: bytes

    def pieces(self, specs: Sequence[ParameterSpec], read: ReadBits) -> Iterator[memoryview]:
        """The bytes of the file, piece by piece. Each is valid until the next is asked for."""
        yield memoryview(self.header)
        for number in self.numbers:
            spec = specs[number]
            step = _PIECE_BYTES // spec.dtype.item_size
            for start in range(0, spec.numel, step):
                bits = read(number, start, min(start + step, spec.numel)).cpu().contiguous()
                yield bits.numpy().data.cast("B")


def shards_of(specs: Sequence[ParameterSpec], *, max_bytes: int) -> list[Shard]:
    """Split a model into files, with an index if they are several, as transformers writes them.

    Args:
        specs: The layout; a tied tensor is written once, by its canonical name. The metadata of
            its file has the others, as `safetensors.torch.load_model` reads them.
        max_bytes: Of the tensors in a file. A larger tensor has a file of its own.

    Raises ConfigError for a name that safetensors reserves.
    """
    groups: list[list[int]] = [[]]
    room = max_bytes
    for number, spec in enumerate(specs):
        if _METADATA in spec.names:
            raise ConfigError(f"{_METADATA!r} cannot be the name of a tensor in safetensors")
        num_bytes = _bytes_of(spec)
        if num_bytes > room and groups[-1]:
            groups.append([])
            room = max_bytes
        groups[-1].append(number)
        room -= num_bytes
    if len(groups) == 1:
        return [_shard("model.safetensors", groups[0], specs)]
    names = (f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1))
    shards = [_shard(name, group, specs) for name, group in zip(names, groups, strict=True)]
    places = {specs[number].name: shard.name for shard in shards for number in shard.numbers}
    total = sum(map(_bytes_of, specs))
    data = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    index = json.dumps(data, indent=2).encode() + b"\n"
    return [*shards, Shard(INDEX, (), index)]


def _shard(name: str, numbers: list[int], specs: Sequence[ParameterSpec]) -> Shard:
    # Larger elements first, so that each tensor is aligned.
    ordered = sorted(numbers, key=lambda number: -specs[number].dtype.item_size)
    tied = {other: specs[number].name for number in ordered for other in specs[number].names[1:]}
    entries: dict[str, object] = {_METADATA: {"format": "pt"} | tied}
    end = 0
    for number in ordered:
        spec = specs[number]
        begin, end = end, end + _bytes_of(spec)
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype.name],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_ALIGNMENT, "little") + text
    return Shard(name, tuple(ordered), header)


def _bytes_of(spec: ParameterSpec) -> int:
    return spec.numel * spec.dtype.item_size
