"""Interruptions at bad moments: no mixture goes unnoticed, nobody is left waiting."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy

import pytest
import torch

from deltasync.delta.bits import as_bits
from deltasync.delta.staging import Staging
from deltasync.errors import DirtyReceiver, NoReceivers, SyncAborted
from tests.worlds.engines import engine, model
from tests.worlds.links import LINKS, Model, Serving, bits_equal, fleet, until


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_commit_is_undone_or_dirty(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the write, and again in the undo: then the weights must not serve."""

    def half(staging: Staging) -> int:
        staging._staged[0].commit()
        raise KeyboardInterrupt

    def interrupted(staging: Staging) -> None:
        raise KeyboardInterrupt

    with engine() as here:
        sent = here.send()
        assert here.receiver.receive_weights(timeout_s=60) == 1
        sent.result(60)
        before = deepcopy(here.replica)
        as_bits(here.source.get_parameter("b").data)[3] ^= 1
        sent = here.send_step(timeout_s=60)
        assert here.receiver.stage(timeout_s=60)
        with monkeypatch.context() as patched:
            patched.setattr(Staging, "commit", half)
            if again:
                patched.setattr(Staging, "undo", interrupted)
            with pytest.raises(KeyboardInterrupt):
                here.receiver.commit()
        assert here.receiver.is_dirty == again
        if again:
            with pytest.raises(DirtyReceiver):
                here.receiver.check_serving()
        assert bits_equal(here.replica, before) != again
        healing = Serving(here.receiver).start()
        with pytest.raises(SyncAborted):
            sent.result(60)
        here.send().result(60)
        healing.stop()
        assert bits_equal(here.source, here.replica)
        assert not here.receiver.is_dirty


def test_a_first_engine_that_cannot_be_served_is_refused_and_the_next_one_served() -> None:
    source, replica = model(0), model(1)
    with fleet(source) as here:
        odd = here.add(Model({n: torch.zeros(300, dtype=torch.int8) for n in "ab"}), engine="odd")
        here.wait(1)
        here.add(replica, engine="good")
        here.wait(2)
        stats = here.sender.send_weights(timeout_s=60)
        assert stats.receivers == 1
        assert "odd" in stats.lost
        assert bits_equal(source, replica)
        until(lambda: any("int8" in str(error) for error in odd.errors))


def test_a_large_greeting_is_heard_at_the_first_sync() -> None:
    tensors = {f"{'weight' * 200}_{n}": torch.zeros(2) for n in range(300)}
    source, replica = Model(tensors), Model(tensors)
    joined: list[int] = []

    def is_sent() -> bool:
        with suppress(NoReceivers):
            joined.append(here.sender.send_weights(timeout_s=60).joined)
        return bool(joined)

    with fleet(source, link=LINKS["shared memory"]) as here:
        here.add(replica)
        until(is_sent)
    assert joined == [1]
