"""Coded payloads at receivers that hold a part, or nothing. Rows: `test_row_codecs`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync.delta.bits import Live
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.delta.codecs.registry import ROW_CODECS
from deltasync.dtypes import BY_NAME
from deltasync.errors import ProtocolViolation, UnknownCodec
from deltasync.store.classes.codec import ClassCodec as ClassCodec  # encodes and decodes `class`
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.messages import Bucket
from tests.delta.device_payloads import Change, by_host, change_of, near, specs_of

CODECS = [IndexCodec.GAP, IndexCodec.BLOCK, IndexCodec.CLASS]


class Half:
    """A parameter of which a receiver holds the first elements."""

    def __init__(self, inner: Live, kept: int) -> None:
        self.inner, self.kept = inner, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def held(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, min(stop, max(start, self.kept)))

    def keeps(self, positions: Tensor) -> Tensor:
        return positions < self.kept

    def read(self, start: int, stop: int) -> Tensor:
        return self.inner.read(start, min(stop, max(start, self.kept)))


def coded(codec: IndexCodec) -> tuple[Change, bytes]:
    specs = specs_of((BY_NAME["bfloat16"], 5000))
    change = change_of(specs, near(specs, [0.02], 3), 3, "cpu")
    old = LiveOld(specs, change.flats)
    return change, encode_payload(change.payload.numpy(), 1, old, codec).to_bytes(compressed=True)


def tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("codec", CODECS)
def test_who_holds_a_part_decodes_that_part(codec: IndexCodec) -> None:
    """Or, of `class`, is refused; who holds nothing needs no old values."""
    change, data = coded(codec)
    [(_, sent)] = change.runs
    arguments = data, 1, len(change.payload), change.specs
    assert isinstance(by_host(*arguments, {}), bytes)
    half: Any = Half(change.flats[0], 2000)
    half.inner.line[2000:] = 0
    raw = by_host(*arguments, {0: half})
    if codec is IndexCodec.CLASS:
        assert isinstance(raw, ProtocolViolation)
        assert "gap" in str(raw)
        return
    assert isinstance(raw, bytes)
    [(_, found)] = BucketReader(change.specs).read(tensor(raw), 1)
    assert found.indices is not None
    assert sent.indices is not None
    assert found.bits is not None
    assert sent.bits is not None
    assert torch.equal(found.indices, sent.indices)
    mine = found.positions() < 2000
    assert torch.equal(found.bits[mine], sent.bits[mine])


def test_a_reader_without_weights_says_so() -> None:
    change, data = coded(IndexCodec.GAP)
    raw_bytes = len(change.payload)
    message = Bucket(version=2, sequence=0, compression="coded", num_rows=1, raw_bytes=raw_bytes)
    with pytest.raises(UnknownCodec, match="needs the weights"):
        BucketReader(change.specs).unpack(message, tensor(data))


def test_who_has_not_loaded_a_codec_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    change, data = coded(IndexCodec.CLASS)
    monkeypatch.delitem(ROW_CODECS, IndexCodec.CLASS)
    found = by_host(data, 1, len(change.payload), change.specs, change.flats)
    assert isinstance(found, UnknownCodec)
    with pytest.raises(UnknownCodec, match=r"import deltasync\.store"):
        coded(IndexCodec.CLASS)
