"""Three ways from a trainer's weights to an engine's through a store.

The two that are not ours are written from descriptions of other systems, on the same client of the
store. Neither checks what it fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import zstandard
from safetensors.torch import load, load_file, save
from torch import nn

from benchmarks.codec.training import Weights
from benchmarks.syncs.geometry import assembled
from deltasync import ModuleSource, ModuleTarget
from deltasync.store.objects import Objects, StoreOptions
from deltasync.store.receiver import StoreReceiver
from deltasync.store.sender import StoreSender
from deltasync.sync.options import SenderOptions
from deltasync.wire.compression import compress


class Way(Protocol):
    """Both ends of one way.

    Attributes:
        name: For tables.
        engine: What it brings the weights into.
    """

    name: str
    engine: nn.Module

    def publish(self) -> None:
        """The trainer's part: returns when the store has the version."""
        ...

    def fetch(self) -> None:
        """The engine's part: returns when the weights are the trainer's."""
        ...

    def close(self) -> None: ...


class Deltas:
    """deltasync: a delta of the wire format and a manifest, checked against digests."""

    def __init__(
        self, trainer: nn.Module, url: str, store: StoreOptions, options: SenderOptions
    ) -> None:
        self.name, self.engine = f"deltasync, {options.compression}", empty_like(trainer)
        self._sender = StoreSender(ModuleSource(trainer), url, options=options, store=store)
        self._receiver = StoreReceiver(ModuleTarget(self.engine), url, store=store)

    def publish(self) -> None:
        self._sender.publish()

    def fetch(self) -> None:
        self._receiver.fetch()

    def close(self) -> None:
        self._receiver.close()


class Checkpoint:
    """The whole checkpoint: written, fetched, loaded."""

    name = "whole checkpoint"

    def __init__(self, trainer: nn.Module, url: str, store: StoreOptions) -> None:
        self._trainer, self.engine = trainer, empty_like(trainer)
        self._objects = Objects(url, store, make=True)

    def publish(self) -> None:
        _upload(self._objects, "model.safetensors", save(state_of(self._trainer)))

    def fetch(self) -> None:
        load_into(self.engine, load(_download(self._objects, "model.safetensors")))

    def close(self) -> None:
        pass


class PatchedFile:
    """The file XORed with the last one, by zstd: the engine patches its file and reloads it.

    This is the shape of slime's and ModelExpress's deltas. The first version is a whole file, which
    counts for nothing here.
    """

    name = "XOR of the file, zstd; patch, reload"

    def __init__(self, trainer: nn.Module, url: str, store: StoreOptions, *, folder: Path) -> None:
        self._trainer, self.engine = trainer, empty_like(trainer)
        self._objects = Objects(url, store, make=True)
        self._file = folder / "model.safetensors"
        self._last = np.frombuffer(save(state_of(trainer)), np.uint8)
        self._file.write_bytes(self._last.tobytes())

    def publish(self) -> None:
        new = np.frombuffer(save(state_of(self._trainer)), np.uint8)
        _upload(self._objects, "delta.zst", compress(np.bitwise_xor(new, self._last).data))
        self._last = new

    def fetch(self) -> None:
        patch = zstandard.ZstdDecompressor().decompress(_download(self._objects, "delta.zst"))
        file = np.memmap(self._file, np.uint8, "r+")
        np.bitwise_xor(file, np.frombuffer(patch, np.uint8), out=file)
        file.flush()
        del file
        load_into(self.engine, load_file(self._file))

    def close(self) -> None:
        pass


def module_of(weights: Weights) -> nn.Module:
    """A module with copies of these parameters."""
    return assembled((name, tensor.clone()) for name, tensor in weights.items())


def empty_like(module: nn.Module) -> nn.Module:
    """The same parameters, all 0."""
    return module_of({name: torch.zeros_like(one) for name, one in module.named_parameters()})


def state_of(module: nn.Module) -> Weights:
    """The parameters, by name; not copied."""
    return {name: one.detach() for name, one in module.named_parameters()}


def load_into(module: nn.Module, weights: Weights) -> None:
    """Copy weights by name."""
    for name, one in state_of(module).items():
        one.copy_(weights[name])


def _upload(objects: Objects, key: str, data: bytes) -> None:
    size = objects.options.part_bytes

    def parts() -> Iterator[memoryview]:
        view = memoryview(data)
        return (view[at : at + size] for at in range(0, len(view), size))

    objects.write(key, parts)


def _download(objects: Objects, key: str) -> bytes:
    """An object, by several requests at once."""
    facts, size = objects.head(key), objects.options.part_bytes
    assert facts is not None
    starts = range(0, facts.num_bytes, size)
    with ThreadPoolExecutor(objects.options.parallel) as pool:
        ends = (min(start + size, facts.num_bytes) for start in starts)
        found = pool.map(lambda part: objects.get_range(key, *part), zip(starts, ends, strict=True))
        return b"".join(found)
