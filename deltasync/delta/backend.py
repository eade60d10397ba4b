"""What computes on a set of weights that is worked on together, chosen once for the set.

The set is what a sender keeps of its source, or what a receiver has live. `delta.host` works on one
parameter after another, wherever they are; `delta.batched` on all of them in each launch, on one
GPU. A back end for another kind of device is one more package with a `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.delta.bits import Flat, Live, torch_dtype
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.codecs.coding import Payload
from deltasync.delta.codecs.decoding import Decoder
from deltasync.delta.codes import Codes
from deltasync.delta.digests import DigestLedger, Ints
from deltasync.delta.host.backend import HostBackend
from deltasync.delta.policy import Policy
from deltasync.delta.readers import Reader, kept_dtype
from deltasync.delta.shard import Share
from deltasync.errors import ConfigError

Kernels = Literal["auto", "triton", "torch"]
"""What compares and writes: Triton's kernels, torch's operations, or what fits the device best."""

_ALIGNMENT = 16  # bytes: what kernels read at once


class Digests(Protocol):
    """The digests of a version, wherever they are kept."""

    @property
    def total(self) -> int:
        """Of the whole model."""
        ...

    def digest_of(self, copies: NDArray[np.uint64] | None) -> int:
        """Of uint64[parameters] copies of each parameter together; None for one of each."""
        ...


class Plan(Protocol):
    """What a round needs to know of what it sends.

    Attributes:
        base_version: The version that it fits on, or None when it fits on any.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
    """

    base_version: int | None
    sparse_bytes: int
    dense_bytes: int

    @property
    def ledger(self) -> Digests:
        """The digests that receivers arrive at. Asked for when everything is packed."""
        ...

    def buckets(self) -> Iterator[Payload]:
        """The payloads, in order; each is written before the next is asked for."""
        ...

    def decided(self) -> None:
        """The version is final: advance the snapshot."""
        ...


class Delta(Plan, Protocol):
    """A plan made by comparing.

    Attributes:
        held_bytes: Memory for what is kept until the decision.
    """

    @property
    def held_bytes(self) -> int: ...

    @property
    def nnz(self) -> int:
        """Elements that differ."""
        ...

    @property
    def changed(self) -> Ints:
        """int64[n], increasing: numbers of the parameters that differ."""
        ...

    def counts(self) -> Ints:
        """int64[n]: elements that differ, of each of `changed`."""
        ...


class Applier(Protocol):
    """Brings one sync into the weights: staged, or in place."""

    @property
    def in_place(self) -> bool:
        """Whether `stage_bucket` writes."""
        ...

    @property
    def staged_bytes(self) -> int: ...

    @property
    def ledger(self) -> DigestLedger:
        """The digests after `commit`."""
        ...

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Check its rows and take them over. Raises InvalidIndices, LimitExceeded."""
        ...

    def commit(self) -> int:
        """Write, and read back. Returns the digest of the weights. Raises DigestMismatch."""
        ...

    def undo(self) -> None:
        """Put the old bits back, or raise DigestMismatch."""
        ...


class Backend(Protocol):
    """A set of weights, and what a sync does with them.

    A sender calls `capture`, `compare` and `full`; a receiver `measure` and `stage`.

    Attributes:
        ledger: The digests of the version that the weights hold. A decision replaces it at a
            sender; at a receiver the caller does that when a sync is written.
        device: Where kernels work on all weights together; None if there is no such device.
        bucket_bytes: The largest payload, unless the options say otherwise.
    """

    ledger: DigestLedger

    @property
    def device(self) -> torch.device | None: ...

    @property
    def bucket_bytes(self) -> int: ...

    @property
    def flats(self) -> Mapping[int, Live]:
        """The weights by parameter. Not owned."""
        ...

    @property
    def decoder(self) -> Decoder | None:
        """What decodes payloads where the weights are; None if the host has to."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def capture(self, readers: Sequence[Reader]) -> None:
        """Overwrite the weights with a source, and measure them."""
        ...

    def compare(
        self,
        readers: Sequence[Reader],
        *,
        policy: Policy,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Delta:
        """How a source differs from the weights.

        Args:
            readers: The source, in layout order. It must not change until its elements are packed.
            policy: When to go dense.
            bucket_bytes: Largest payload.
            max_held_bytes: Memory for sparse changes kept until the decision. What does not fit
                is written to the weights while it is packed.
            base_version: What the weights hold.
            meanwhile: Called before the outcome is known, while kernels run. What it raises is
                raised.
        """
        ...

    def full(self, *, bucket_bytes: int) -> Plan:
        """All of the weights, in payloads of at most so many bytes."""
        ...

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: the digests of int64[n] chunks of the ledger, read from memory."""
        ...

    def stage(
        self, *, sparse_bytes: int, dense_bytes: int, max_bytes: int, writing: Callable[[], None]
    ) -> Applier:
        """Begin to bring a sync into the weights.

        Args:
            sparse_bytes, dense_bytes: Indices and values that it declares.
            max_bytes: Memory for staging. A sync that needs more is written in place.
            writing: Called before something is written in place.
        """
        ...

    def synchronize(self) -> None:
        """Return when no kernel reads or writes the weights any more."""
        ...


def snapshot_of(
    shares: Sequence[Share],
    readers: Sequence[Reader],
    *,
    chunk_numel: int,
    device: torch.device | None = None,
    kernels: Kernels = "auto",
) -> Backend:
    """A copy of a source as it is now: what the next delta is taken against.

    Args:
        shares: What there is to send; `shard.whole` makes it of a layout.
        readers: The source of these, in that order.
        chunk_numel: Elements in a chunk of the ledger.
        device: Where to keep the copy; None for each parameter's own device.
        kernels: What compares.
    """
    ledger = DigestLedger(shares, chunk_numel=chunk_numel)
    backend = backend_for(_empty_like(readers, device), ledger, kernels=kernels, readers=readers)
    backend.capture(readers)
    return backend


def backend_for(
    flats: Mapping[int, Live],
    ledger: DigestLedger,
    *,
    kernels: Kernels,
    readers: Sequence[Reader] = (),
) -> Backend:
    """Choose what works on these weights.

    They are worked on in batches if they share a GPU, Triton is installed, and kernels find every
    element. Raises ConfigError if batches are demanded ("triton") and not possible.

    Args:
        flats: The weights by parameter. They must outlive the back end.
        ledger: Which of them count, and in which chunks. Owned from now on; the sums are not looked
            at, and stay as they are until `capture`.
        kernels: What is asked for.
        readers: At a sender, what the weights are copies of.
    """
    devices = {flat.line.device for flat in flats.values()}
    if readers:  # kernels reach pinned host memory, but not the memory of another GPU
        devices = {reader.device for reader in readers} | {d for d in devices if d.type != "cpu"}
    numel = sum(flat.numel for flat in flats.values())
    device = _device_for_batches(devices, numel, kernels, flats.values())
    if device is None:
        return HostBackend(flats, ledger)
    from deltasync.delta.batched.backend import BatchedBackend
    from deltasync.delta.batched.warm_up import warm_up

    backend = BatchedBackend(flats, ledger, device)
    formats = {(kept_dtype(reader), reader.dtype) for reader in readers}
    warm_up(
        frozenset(formats or {(flat.dtype, flat.dtype) for flat in flats.values()}),
        ledger.chunk_numel,
        device,
        computed=frozenset(
            reader.computation.kind for reader in readers if reader.computation is not None
        ),
        box_dims=backend.weights.boxes.dims,
        has_codes=backend.weights.boxes.has_codes,
        has_gaps=backend.weights.has_gaps,
    )
    return backend


def _device_for_batches(
    devices: set[torch.device], numel: int, kernels: Kernels, flats: Iterable[Live]
) -> torch.device | None:
    if kernels == "torch" or (kernels == "auto" and {d.type for d in devices} != {"cuda"}):
        return None
    problem = None
    if find_spec("triton") is None:
        problem = "Triton is not installed"
    elif len(devices) != 1:
        problem = f"the weights live on {len(devices)} devices"
    elif not numel:
        problem = "there are no elements"
    elif {d.type for d in devices} == {"cpu"} and not _is_interpreted():
        problem = "the weights live on a CPU, and TRITON_INTERPRET=1 is not in the environment"
    elif any(isinstance(flat, Codes) and flat.spread() is None for flat in flats):
        problem = "codes of 4 bits are spread over words in another way in each element"
    if problem is None:
        return devices.pop()
    if kernels == "triton":
        raise ConfigError(f"kernels='triton' is not possible here: {problem}")
    return None


def _is_interpreted() -> bool:
    from deltasync.delta.kernels.triton_base import IS_INTERPRETED

    return IS_INTERPRETED


def _empty_like(readers: Sequence[Reader], device: torch.device | None) -> dict[int, Flat]:
    """Room for each parameter in its wire dtype: views of one buffer on each device.

    Host memory beside a GPU is pinned, so that the GPU reads it at the speed of the bus.
    """
    devices = [device or reader.device for reader in readers]
    flats: dict[int, Flat] = {}
    for place in dict.fromkeys(devices):
        here = [number for number, own in enumerate(devices) if own == place]
        sizes = [readers[number].numel * readers[number].dtype.item_size for number in here]
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        is_pinned = place.type == "cpu" and any(readers[n].device.type == "cuda" for n in here)
        buffer = torch.empty(ends[-1], dtype=torch.uint8, device=place, pin_memory=is_pinned)
        for number, begin, size in zip(here, [0, *ends], sizes, strict=False):
            view = buffer[begin : begin + size].view(torch_dtype(readers[number].dtype))
            flats[number] = Flat.of(view)
    return dict(sorted(flats.items()))
