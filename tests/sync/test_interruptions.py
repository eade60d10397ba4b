"""Interruptions at bad moments: no mixture goes unnoticed, nobody is left waiting."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.delta.bits import as_bits
from deltasync.delta.host.staging import Staging
from deltasync.errors import DirtyReceiver, NoReceivers, SyncAborted
from deltasync.transports import inprocess, shared_memory
from tests.worlds.links import Model, Serving, bits_equal, fleet


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model({name: torch.randn(40, generator=generator).to(dtype) for name in "ab"})


def change(source: nn.Module) -> None:
    for parameter in source.parameters():
        as_bits(parameter.data)[3] ^= 1


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_commit_is_undone_or_dirty(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the write, and again in the undo: then the weights must not serve."""
    source, replica = model(0), model(0)
    before = [parameter.clone() for parameter in replica.parameters()]
    transport = inprocess.Sender()
    sender = WeightSender(ModuleSource(source), transport)
    receiver = WeightReceiver(ModuleTarget(replica), transport.receiver())
    write, undo = Staging.commit, Staging.undo

    def half(staging: Staging) -> int:
        staging._runs[0].commit()
        raise KeyboardInterrupt

    def interrupted(staging: Staging) -> None:
        raise KeyboardInterrupt

    outcome: list[type[BaseException]] = []

    class Once(Serving):
        def _turn(self) -> None:
            try:
                self.versions.append(receiver.receive_weights(timeout_s=10))
            except KeyboardInterrupt as error:
                outcome.append(type(error))
                self._stop.set()

    serving = Once(receiver).start()
    try:
        sender.wait_for_receivers(1, timeout_s=10)
        sender.send_weights(timeout_s=5)
        monkeypatch.setattr(Staging, "commit", half)
        if again:
            monkeypatch.setattr(Staging, "undo", interrupted)
        change(source)
        with pytest.raises(SyncAborted):
            sender.send_weights(timeout_s=5)
        serving._thread.join(10)
        assert outcome == [KeyboardInterrupt]
        assert receiver.is_dirty == again
        if again:
            with pytest.raises(DirtyReceiver):
                receiver.check_serving()
        else:
            now = list(replica.parameters())
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        monkeypatch.setattr(Staging, "commit", write)
        monkeypatch.setattr(Staging, "undo", undo)
        healing = Serving(receiver).start()
        sender.wait_for_receivers(1, timeout_s=10)
        sender.send_weights(timeout_s=5)
        healing.stop()
        assert bits_equal(source, replica)
        assert not receiver.is_dirty
    finally:
        serving.stop()
        sender.close()


def test_a_first_engine_that_cannot_be_served_is_refused_and_the_next_one_served() -> None:
    source, replica = model(0, torch.float32), model(1, torch.float32)
    with fleet(source) as here:
        odd = here.add(Model({n: torch.zeros(40, dtype=torch.int8) for n in "ab"}), engine="odd")
        here.wait(1)
        here.add(replica, engine="good")
        here.wait(2)
        stats = here.sender.send_weights(timeout_s=5)
        assert stats.receivers == 1
        assert "odd" in stats.lost
        assert bits_equal(source, replica)
        deadline = time.monotonic() + 10
        while not odd.errors:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "int8" in str(odd.errors[0])


def test_a_large_greeting_is_heard_at_the_first_sync(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight".replace(".", "_"): torch.zeros(2) for n in range(4000)}
    source, replica = Model(tensors), Model(tensors)
    sender = WeightSender(ModuleSource(source), shared_memory.Sender(tmp_path / "socket"))
    link = shared_memory.Receiver(tmp_path / "socket")
    serving = Serving(WeightReceiver(ModuleTarget(replica), link)).start()
    try:
        deadline = time.monotonic() + 20
        while serving.receiver.state.name == "OUTSIDE":
            assert time.monotonic() < deadline
            try:
                stats = sender.send_weights(timeout_s=5)
                break
            except NoReceivers:
                time.sleep(0.05)
        else:
            stats = sender.send_weights(timeout_s=5)
        assert stats.joined == 1
    finally:
        serving.stop()
        sender.close()
