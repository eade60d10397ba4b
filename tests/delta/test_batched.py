"""What kernels alone can do wrong: rounding, the last block, and writes that break off.

Without a GPU they run under Triton's interpreter, which takes milliseconds for each program.
`test_ends` and `test_boxes` compare them with torch's operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.batched.masks import Masks
from deltasync.delta.batched.staging import BatchedStaging, _Dense, _Sparse
from deltasync.delta.bits import as_bits
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import ShardSpec
from deltasync.errors import DigestMismatch
from tests.delta.ends import DEVICE, Model, Rank, Receiver, equal, sole
from tests.worlds.bits import random_bits, specs_of


def ends(model: Model, *, chunk_numel: int = 1000, **options: Any) -> tuple[Rank, Receiver]:
    """A trainer and an engine of one model, both on kernels."""
    receiver = Receiver(model, "triton", chunk_numel=chunk_numel, layout="contiguous")
    return sole(model, "triton", Policy(**options)), receiver


def sent(sender: Rank, receiver: Receiver) -> int:
    """How many elements changed, once the engine has them."""
    plan = sender.delta()
    assert receiver.sync([plan]) == plan.ledger.total
    plan.decided()
    return plan.nnz


@pytest.mark.parametrize("dense_above", [0.0, 1.0])
def test_float32_is_rounded_as_elsewhere(dense_above: float) -> None:
    """Any bits, and what lies between two numbers, which goes to the even one."""
    any_bits = random_bits(dtypes.BY_NAME["float32"], 2000, np.random.default_rng(0))
    halves = (torch.arange(0x3F00, 0x4000, dtype=torch.int32) << 16) + 0x8000
    values = torch.cat([any_bits, halves, halves ^ -(1 << 31)]).view(torch.float32)
    zeros = {"w": torch.zeros(len(values), dtype=torch.bfloat16)}
    policy = Policy(chunk_numel=3000, dense_above=dense_above)
    whole = {"w": ShardSpec.whole((len(values),))}
    sender = Rank(specs_of(zeros), whole, {"w": torch.zeros(len(values))}, "triton", policy)
    receiver = Receiver(zeros, "triton")
    sender.held["w"].copy_(values)
    sent(sender, receiver)
    plain = WireReader.of(values, dtypes.BY_NAME["bfloat16"], name="w").read(0, len(values))
    assert torch.equal(as_bits(receiver.live["w"].cpu()), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_negative_zero_is_a_change_in_whole_blocks_and_in_the_last(dtype: torch.dtype) -> None:
    model = {"w": torch.zeros(4096 + 9, dtype=dtype)}
    sender, receiver = ends(model, chunk_numel=1 << 20, dense_above=1.0)
    sender.held["w"][[0, 1, 4095, 4096, 4104]] = -0.0
    assert sent(sender, receiver) == 5
    assert equal(receiver.live, sender.held)


# What breaks off


class Stop(BaseException):
    """What no code expects: as if somebody had pressed Ctrl-C."""


def test_a_snapshot_that_is_ahead_when_packing_breaks_off_is_known_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"w": torch.int16, "f": torch.int32}
    model = {name: torch.zeros(300, dtype=dtype) for name, dtype in kinds.items()}
    sender, receiver = ends(model, chunk_numel=100, dense_above=1.0)
    sender.held["w"][[5, 150]] = 1
    sender.held["f"][3] = 9
    collect = Masks._collect

    def collect_and_stop(*args: Any, **options: Any) -> None:
        collect(*args, **options)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Masks, "_collect", collect_and_stop)
        with pytest.raises(Stop):
            receiver.stage([sender.delta(0)])
    sent(sender, receiver)
    assert equal(receiver.live, sender.held)
    assert np.array_equal(sender.snapshot.ledger.sums, sender.measured())


def in_parts(dense_above: float, receiver_chunk: int) -> tuple[Tensor, BatchedStaging]:
    """Several parts: sparse rows, or dense ones that are whole chunks or not."""
    model = {"w": torch.arange(400, dtype=torch.int16)}
    sender = sole(model, "triton", Policy(chunk_numel=100, dense_above=dense_above))
    receiver = Receiver(model, "triton", chunk_numel=receiver_chunk, layout="contiguous")
    sender.held["w"][::4] = 3
    staging = receiver.stage([sender.delta(0, 300)])
    assert isinstance(staging, BatchedStaging)
    assert {type(part) for part, _ in staging._staged} == {_Dense if dense_above == 0 else _Sparse}
    return receiver.live["w"], staging


every_kind = pytest.mark.parametrize(
    ("dense_above", "receiver_chunk"), [(1.0, 150), (0.0, 150), (0.0, 100), (0.0, 1000)]
)


def broken_off(staging: BatchedStaging, calls: int, *, counted: bool) -> None:
    """Commit until so many parts are written, and, unless it is counted, into the last one."""
    write, left = staging._write, [calls]

    def stopping(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop
        write(*args)
        if not (left[0] or counted):
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_write", stopping)
        with pytest.raises(Stop):
            staging.commit()


@pytest.mark.parametrize("calls", [0, 1, 2])
@every_kind
def test_a_commit_that_breaks_off_is_taken_back(
    calls: int, dense_above: float, receiver_chunk: int
) -> None:
    live, staging = in_parts(dense_above, receiver_chunk)
    broken_off(staging, calls, counted=True)
    before = torch.arange(400, dtype=torch.int16)
    assert torch.equal(live.cpu(), before) == (calls == 0)
    staging.undo()
    assert torch.equal(live.cpu(), before)


@every_kind
def test_a_write_that_nobody_counted_is_not_taken_for_undone(
    dense_above: float, receiver_chunk: int
) -> None:
    for calls in (1, 2):
        _, staging = in_parts(dense_above, receiver_chunk)
        broken_off(staging, calls, counted=False)
        with pytest.raises(DigestMismatch):
            staging.undo()


@pytest.mark.promise(
    "Checks",
    "What is written is read back; a write that does not persist is an error.",
)
@pytest.mark.parametrize(("dense_above", "receiver_chunk"), [(1.0, 150), (0.0, 1000)])
def test_weights_that_changed_after_they_were_checked_cannot_be_put_back(
    dense_above: float, receiver_chunk: int
) -> None:
    live, staging = in_parts(dense_above, receiver_chunk)
    live[352] = 9
    assert staging.commit() == staging.ledger.total
    with pytest.raises(DigestMismatch):
        staging.undo()


@pytest.mark.gpu
def test_indices_stay_right_beyond_2_to_the_31() -> None:
    numel = (1 << 31) + 5000
    model = {"w": torch.zeros(numel, dtype=torch.uint8, device=DEVICE)}
    places = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, numel - 1], device=DEVICE)
    sender, receiver = ends(model, chunk_numel=1 << 20)
    sender.held["w"][places] = 3
    assert sent(sender, receiver) == len(places)
    assert torch.equal(receiver.live["w"], sender.held["w"])
