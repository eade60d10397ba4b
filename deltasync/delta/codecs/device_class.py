"""The codec `class` on a device: many rows of one dtype at once, in a few launches.

What is made is bit for bit what `codecs.classes` makes for the same choices, and what that makes is
decoded. Blocks of rows lie side by side, at any byte.

Old bits are read where they lie: all of them once at each end, and once more those of the blocks of
512 elements that changes lie in. Memory is taken for two bytes of each class of such a block, and
for about 75 bytes of each change.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import Numbers
from deltasync.delta.codecs import class_positions
from deltasync.delta.codecs.base import Needs
from deltasync.delta.codecs.device_base import Checks, DeviceBlocks, DeviceRows, Ints
from deltasync.delta.codecs.device_class_choices import Changes, choose
from deltasync.delta.codecs.device_class_errors import check
from deltasync.delta.codecs.device_class_index import IndexBlocks, measured_index
from deltasync.delta.codecs.device_class_lines import Layout
from deltasync.delta.codecs.device_class_values import ValueBlocks, measured_values
from deltasync.wire.codecs import IndexCodec, ValueCodec


class DeviceClassCodec:
    """Codes rows by classes of their old values; see `DeviceCodec`.

    To encode waits twice for the device: to learn how many classes rows have, and how long the
    blocks are; once more for integers of up to 4 bytes, whose frequent steps are counted. To read
    indices waits once, and to read values once.
    """

    index_codec = IndexCodec.CLASS
    value_codec = ValueCodec.CLASS
    needs = Needs.SPAN

    def encode(self, rows: DeviceRows, indices: Tensor, new: Tensor, old: Tensor) -> DeviceBlocks:
        """The blocks of rows, and how long they are."""
        assert rows.spans_at is not None
        changes = Changes(new, old, rows.counts, rows.dtype)
        choices = choose(changes, rows.spans_at, rows.spans)
        each = Numbers(torch.stack([choices.num_index, choices.num_value])).read()
        lane_bits = np.full(len(rows.counts), class_positions.LANE_BITS)
        layout = Layout(rows.spans_at, rows.spans, lane_bits, each[0], rows.counts)
        index = measured_index(indices, layout, choices.index, rows.dtype)
        value = measured_values(changes, choices, each[1])
        lengths = Numbers(torch.stack([index.num_bytes, value.num_bytes])).read()
        return DeviceBlocks(index.written(lengths[0]), value.written(lengths[1]), *lengths)

    def indices(self, rows: DeviceRows, index: Tensor, index_bytes: Ints, checks: Checks) -> Tensor:
        """int32[n]: the indices of rows. Raises WireError."""
        assert rows.spans_at is not None
        blocks = IndexBlocks.read(index, index_bytes, rows.spans, rows.dtype)
        found = blocks.decoded(rows.spans_at, rows.counts)
        checks.add(blocks.errors, check)
        return found

    def values(
        self, rows: DeviceRows, value: Tensor, value_bytes: Ints, old: Tensor, checks: Checks
    ) -> Tensor:
        """int[n]: the new bits of rows' changes. Raises WireError."""
        blocks = ValueBlocks.read(value, value_bytes, rows.counts, rows.dtype)
        new = blocks.decoded(old)
        checks.add(blocks.errors, check)
        return new
