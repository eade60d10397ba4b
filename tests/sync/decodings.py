"""Which payloads a device decodes, seen from tests of whole syncs."""

from __future__ import annotations

import pytest
from torch import Tensor

from deltasync.delta.batched import decoding


def decodings(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What devices make of payloads from now on; None for each that the host has to decode."""
    found, decode_one = list[Tensor | None](), decoding.DeviceDecoder.decode

    def noted(self: decoding.DeviceDecoder, *args: object, **kwargs: object) -> object:
        made = decode_one(self, *args, **kwargs)  # type: ignore[arg-type]
        found.append(None if made is None else made.payload)
        return made

    monkeypatch.setattr(decoding.DeviceDecoder, "decode", noted)
    return found
