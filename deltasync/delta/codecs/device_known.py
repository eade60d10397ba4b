"""The codecs that work on devices. Whoever imports this has Triton."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deltasync.delta.codecs.device_base import DeviceCodec
from deltasync.delta.codecs.device_blocks import DeviceBlockCodec
from deltasync.delta.codecs.device_class import DeviceClassCodec
from deltasync.wire.codecs import IndexCodec

_ALL: tuple[DeviceCodec, ...] = (DeviceBlockCodec(), DeviceClassCodec())
DEVICE_CODECS: Mapping[IndexCodec, DeviceCodec] = MappingProxyType(
    {codec.index_codec: codec for codec in _ALL}
)
"""By their index codec. What another codec has made, the host reads."""
