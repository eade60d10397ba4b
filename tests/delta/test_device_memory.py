"""How much memory of a GPU it takes to decode a payload."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from deltasync.delta.codecs.blocks import HEADER_BYTES, Shape, encode_indices, field_bytes
from deltasync.delta.codecs.known import digest_at
from deltasync.dtypes import BY_NAME
from deltasync.errors import InvalidIndices
from deltasync.wire.codecs import IndexCodec, ValueCodec
from deltasync.wire.coded import CodedPayload
from deltasync.wire.table import ROW, RowKind, Rows, block_offsets
from tests.delta.device_payloads import by_device, flats_of, specs_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")

BF16 = BY_NAME["bfloat16"]


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that were made, as if none was ever freed."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not str(func).startswith("aten.view"):
            self.num_bytes += made.nbytes
        return made


@pytest.mark.parametrize("is_lie", [False, True])
def test_memory_is_bounded_by_what_a_payload_stands_for(
    monkeypatch: pytest.MonkeyPatch, is_lie: bool
) -> None:
    """A row of as many blocks as its bytes can count, most of them empty."""
    span, count = 1 << 19, 1000
    specs, shape = specs_of((BF16, span)), Shape(4, 1)
    indices = (np.arange(count) * (span // count) // 16 * 16).astype(np.int32)
    index = bytearray(encode_indices(indices, shape, span))
    value = bytes(field_bytes(count, 2))  # all of them moved by one step
    index[HEADER_BYTES] ^= is_lie
    flats = flats_of(specs, 0)
    rows: Rows = np.zeros(1, ROW)
    rows["kind"], rows["index_codec"] = RowKind.SPARSE, IndexCodec.BLOCK
    rows["value_codec"], rows["span"], rows["count"] = ValueCodec.BLOCK, span, count
    rows["index_bytes"], rows["value_bytes"] = len(index), len(value)
    old = flats[0].gather(torch.from_numpy(indices).long()).numpy()
    digests = np.array([digest_at(specs[0], 0, indices, old)], np.uint64)
    blocks = (np.frombuffer(block, np.uint8) for block in (index, value))
    data = CodedPayload(rows, digests, *blocks).to_bytes(compressed=False)
    raw_bytes = block_offsets(rows_of_raw(rows))[2]
    assert len(data) > raw_bytes // 2
    run = InterpretedFunction.run

    def unseen(self: Any, *args: Any, **options: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            run(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", unseen)
    with Allocated() as allocated:  # type: ignore[no-untyped-call]
        found = by_device(data, 1, raw_bytes, specs, flats)
    assert isinstance(found, InvalidIndices if is_lie else bytes)
    assert allocated.num_bytes < 12 * raw_bytes


def rows_of_raw(rows: Rows) -> Rows:
    raw = rows.copy()
    raw["index_bytes"], raw["value_bytes"] = 4 * rows["count"], 2 * rows["count"]
    return raw
