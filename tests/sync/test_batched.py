"""Whole syncs on the Triton kernels, interpreted where there is no GPU, with either end plain."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltasync import ReceiverOptions, SenderOptions
from deltasync.delta.backend import Kernels
from deltasync.errors import SourceChanged, SyncAborted
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import Model, Stubborn, bits_equal, fleet, until

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here: see test_gpu.py", allow_module_level=True)


# In an interpreter of its own: kernels are interpreted or not from their definition on.
WITHOUT_INTERPRETER = """
from threading import Thread
from torch.nn import Linear
from deltasync import *
from deltasync.errors import DeltaSyncError
from deltasync.transports import inprocess

told = []

def receive(receiver):
    try:
        receiver.receive_weights(timeout_s=20)
    except DeltaSyncError as error:
        told.append(f"receiver {type(error).__name__} {error}")

for ours, theirs in (("triton", "auto"), ("auto", "triton")):
    link = inprocess.Sender()
    sender = WeightSender(ModuleSource(Linear(8, 8)), link, options=SenderOptions(kernels=ours))
    target, options = ModuleTarget(Linear(8, 8)), ReceiverOptions(kernels=theirs)
    receiver = WeightReceiver(target, link.receiver(), options=options)
    thread = Thread(target=receive, args=(receiver,))
    thread.start()
    sender.wait_for_receivers(1)
    try:
        sender.send_weights(timeout_s=20)
    except DeltaSyncError as error:
        told.append(f"sender {type(error).__name__} {error}")
    thread.join()
print("\\n".join(told))
"""


def model(dtype: torch.dtype, seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "matrix": torch.randn(70, 90, generator=generator),
        "vector": torch.randn(33, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.randn(0, 4, generator=generator),
    }
    return Model({name: tensor.to(dtype) for name, tensor in tensors.items()})


def step(source: Model, share: float) -> None:
    for parameter in source.parameters():
        parameter.data[torch.rand(parameter.shape) < share] *= 1.5


@pytest.mark.parametrize("sender", ["triton", "torch"])
@pytest.mark.parametrize("receiver", ["triton", "torch"])
@pytest.mark.parametrize("share", [0.01, 0.6])
def test_ends_agree_whatever_compares_and_writes(
    sender: Kernels, receiver: Kernels, share: float
) -> None:
    source, staged, in_place = model(torch.float32, 0), *(model(torch.bfloat16, n) for n in (1, 2))
    with fleet(source, options=SenderOptions(kernels=sender, bucket_bytes=4096)) as here:
        here.add(staged, engine="staged", options=ReceiverOptions(kernels=receiver))
        here.add(
            in_place,
            engine="in place",
            options=ReceiverOptions(kernels=receiver, max_staged_bytes=0),
        )
        here.wait(2)
        assert here.sender.send_weights().full_synced == 2
        for _ in range(3):
            step(source, share)
            stats = here.sender.send_weights()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 2, {})
        assert stats.nnz > 0
        assert bits_equal(staged, source.to(torch.bfloat16))
        assert bits_equal(in_place, source)


def replaced(source: Model) -> None:
    matrix = source.get_parameter("matrix")
    source.matrix = torch.nn.Parameter(matrix.detach() * 2, requires_grad=False)


def moved(source: Model) -> None:
    matrix = source.get_parameter("matrix")
    matrix.data = matrix.data * 3


def read_transposed(source: Model) -> None:
    square = source.get_parameter("square")
    square.data = square.data.t()


@pytest.mark.parametrize("move", [replaced, moved, read_transposed])
def test_what_is_found_to_be_replaced_while_kernels_run_is_compared_again(
    move: Callable[[Model], None],
) -> None:
    source, replica = model(torch.bfloat16, 0), model(torch.bfloat16, 1)
    for one in (source, replica):
        one.square = torch.nn.Parameter(torch.randn(8, 8).bfloat16(), requires_grad=False)
    with fleet(source, options=SenderOptions(kernels="triton")) as here:
        here.add(replica, options=ReceiverOptions(kernels="triton"))
        here.wait(1)
        here.sender.send_weights()
        step(source, 0.05)
        move(source)
        stats = here.sender.send_weights()
        assert (stats.kind, stats.receivers) == ("delta", 1)
        assert stats.nnz > 0
        assert bits_equal(source, replica)
        source.get_parameter("matrix").data[0, 0] += 1
        assert here.sender.send_weights().nnz == 1
        assert bits_equal(source, replica)
        del source.scalar
        with pytest.raises(SourceChanged, match="vanished"):
            here.sender.send_weights()


def test_what_kernels_cannot_read_in_place_is_copied_at_each_sync() -> None:
    source, replica = model(torch.bfloat16, 0), model(torch.bfloat16, 1)
    matrix = source.get_parameter("matrix")
    matrix.data = matrix.data.T.contiguous().T
    with fleet(source, options=SenderOptions(kernels="triton")) as here:
        here.add(replica, options=ReceiverOptions(kernels="triton"))
        here.wait(1)
        for number in range(4):
            matrix.data[number, 0] += 1
            stats = here.sender.send_weights()
            assert number == 0 or stats.nnz == 1
            assert bits_equal(source, replica)


def test_a_sync_without_changes_sends_nothing() -> None:
    source, replica = model(torch.bfloat16, 0), model(torch.bfloat16, 1)
    with fleet(source, options=SenderOptions(kernels="triton")) as here:
        here.add(replica, options=ReceiverOptions(kernels="triton"))
        here.wait(1)
        here.sender.send_weights()
        stats = here.sender.send_weights()
        assert (stats.nnz, stats.num_buckets, stats.receivers) == (0, 0, 1)


def test_weights_that_somebody_else_changed_are_found_and_healed() -> None:
    source, replica = model(torch.bfloat16, 0), model(torch.bfloat16, 1)
    with fleet(source, options=SenderOptions(kernels="triton")) as here:
        options = ReceiverOptions(kernels="triton", scrub_every=1)
        serving = here.add(replica, options=options)
        here.wait(1)
        here.sender.send_weights()
        replica.get_parameter("matrix").data[3, 4] += 1
        step(source, 0.02)
        here.wait(1)
        with contextlib.suppress(SyncAborted):  # if it has left between the two
            here.sender.send_weights()
        until(lambda: bool(serving.errors))
        here.wait(1)
        assert here.sender.send_weights().receivers == 1
        assert any("matrix" in str(error) for error in serving.errors)
        assert bits_equal(source, replica)


def test_a_rank_that_fails_undoes_its_engine() -> None:
    source = model(torch.bfloat16, 0)
    ranks = [model(torch.bfloat16, n) for n in (1, 2)]
    targets = [Stubborn(replica) for replica in ranks]
    with fleet(source, options=SenderOptions(kernels="triton")) as here:
        serving = [
            here.add(target, rank=n, world=2, options=ReceiverOptions(kernels="triton"))
            for n, target in enumerate(targets)
        ]
        here.wait(2)
        assert here.sender.send_weights().receivers == 2
        before = [parameter.clone() for parameter in ranks[0].parameters()]
        targets[1].fails = True
        step(source, 0.05)
        with pytest.raises(SyncAborted, match="TargetMoved"):
            here.sender.send_weights()
        until(lambda: bool(serving[0].errors))
        assert all(
            torch.equal(now, then) for now, then in zip(ranks[0].parameters(), before, strict=True)
        )
        here.wait(2)
        assert here.sender.send_weights().receivers == 2
        assert all(bits_equal(source, replica) for replica in ranks)
        assert not any(end.receiver.is_dirty for end in serving)


def test_kernels_are_refused_on_a_cpu_where_nothing_interprets_them() -> None:
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    program = subprocess.run(
        [sys.executable, "-c", WITHOUT_INTERPRETER],
        cwd=Path(__file__).parents[2],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    reason = "kernels='triton' is not possible here: the weights live on a CPU, and TRITON_INTERP"
    at_sender, at_receiver = program.stdout.splitlines()[:2], program.stdout.splitlines()[2:]
    for lines, raised in ((at_sender, "Refused"), (at_receiver, "ConfigError")):
        assert [line.split()[:2] for line in sorted(lines)] == [
            ["receiver", raised],
            ["sender", "SyncAborted"],
        ]
        assert all(reason in line for line in lines), program.stdout
