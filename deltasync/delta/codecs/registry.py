"""The row codecs that this build has, and the digest of the old values that a row was made from."""

from __future__ import annotations

import numpy as np
import torch

from deltasync.delta.codecs.base import Bits, Indices, RowCodec
from deltasync.delta.codecs.blocks import BlockCodec
from deltasync.delta.kernels import host
from deltasync.errors import UnknownCodec
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.digest import GOLDEN_RATIO, MASK, seed
from deltasync.wire.messages import ParameterSpec

ROW_CODECS: dict[IndexCodec, RowCodec] = {IndexCodec.BLOCK: BlockCodec()}
"""Those whose blocks belong together, by their index codec; `deltasync.store` adds `class`."""


def codec_of(number: IndexCodec) -> RowCodec:
    """Raises UnknownCodec if nothing in this process reads and writes such rows."""
    if (codec := ROW_CODECS.get(number)) is None:
        raise UnknownCodec(
            f"codec {number.name.lower()} is not known here: it is for stores and patch files; "
            "import deltasync.store"
        )
    return codec


def digest_at(spec: ParameterSpec, start: int, indices: Indices, old: Bits) -> int:
    """Rule W31: of unsigned[n] `old` bits at int32[n] indices from `start` on; n is at least 1."""
    key = np.array([_key(spec, start)], np.uint64)
    [found] = host.digest_pieces(indices, old, key, np.array([0, len(indices)]))
    return int(found)


def digest_run(spec: ParameterSpec, start: int, old: Bits) -> int:
    """The same, of all elements from `start` on."""
    bits = torch.from_numpy(old.view(f"i{old.itemsize}" if old.itemsize > 1 else "u1"))
    return host.digest_run(bits, _key(spec, 0), start)


def _key(spec: ParameterSpec, start: int) -> int:
    return (seed(spec.name) + start * GOLDEN_RATIO) & MASK
