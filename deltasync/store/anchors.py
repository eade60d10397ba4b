"""Anchors: a whole version as plain safetensors, uploaded as it is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from pydantic import Field
from torch import Tensor

from deltasync.delta.host import digest_run
from deltasync.delta.options import OptionsModel
from deltasync.delta.shard import whole
from deltasync.delta.tiles import Space
from deltasync.errors import DigestMismatch
from deltasync.files.shards import ReadBits, shards_of
from deltasync.store import keys
from deltasync.store.manifest import StoredFile, Way
from deltasync.store.objects import Objects
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec


class PublishOptions(OptionsModel):
    """When a store gets all weights of a version besides its delta."""

    anchor_every: int = Field(default=64, ge=1, description="versions from one anchor to the next")
    anchor_file_bytes: int = Field(
        default=5_000_000_000, ge=1, description="tensors in one file of an anchor"
    )


def write_anchor(
    objects: Objects,
    version: int,
    specs: Sequence[ParameterSpec],
    read: ReadBits,
    *,
    max_file_bytes: int,
    digest: int,
) -> Way:
    """Write all weights of a version.

    Args:
        objects: Of the run.
        version: Which version the weights are.
        specs: The layout.
        read: Reads the weights, which must not change meanwhile.
        max_file_bytes: Tensors of one file, in bytes.
        digest: State digest of the version.

    Raises:
        StoreError: It was not written as a whole. What was written of it is no part of a version.
        DigestMismatch: What was written has another digest; likewise.
    """
    folder = keys.anchor_folder(version)
    shards = shards_of(specs, max_bytes=max_file_bytes)
    space, digests = Space(whole(tuple(specs))), [0] * len(specs)
    place = np.argsort(space.order)  # of each among the shares

    def digested(parameter: int, start: int, stop: int) -> Tensor:
        bits = read(parameter, start, stop).cpu()
        before = digests[parameter] if start else 0  # it may be written a second time
        digests[parameter] = before + digest_run(space, int(place[parameter]), start, bits)
        return bits

    files = list[StoredFile]()
    for shard in shards:
        key, pieces = f"{folder}/{shard.name}", partial(shard.pieces, specs, digested)
        num_bytes, sha256 = objects.write(key, pieces)
        files.append(StoredFile(key=key, bytes=num_bytes, sha256=sha256))
    if sum(digests) & MASK != digest:
        raise DigestMismatch(f"not v{version}: memory was altered; the next version is all weights")
    return Way(kind="anchor", files=tuple(files))
