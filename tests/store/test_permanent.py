"""Errors that no second attempt repairs: who waits is told by their type, and nothing goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import SecretBytes
from torch import nn

from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreReceiver, StoreSender
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    LayoutMismatch,
    MacMismatch,
    ObjectDamaged,
    PeerLost,
    Refused,
    SeveralRuns,
    StoreRefused,
    is_permanent,
)
from deltasync.store.objects import Objects, StoreOptions
from deltasync.sync.staging_thread import StagingThread
from tests.worlds.faults import faulty
from tests.worlds.published import RUN, Follower, Publisher, small_model
from tests.worlds.stores import Place, s3_place, wait_until


def net(dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(64, 64).to(dtype)


def publish(folder: Path, run: str = "run", **options: object) -> nn.Linear:
    model, more = net(), SenderOptions.model_validate({"stream_id": run, **options})
    StoreSender(ModuleSource(model), folder, options=more).publish()
    return model


def of_another_dtype(folder: Path) -> StoreReceiver:
    publish(folder)
    return StoreReceiver(ModuleTarget(net(torch.bfloat16)), folder)


def of_a_key(folder: Path) -> StoreReceiver:
    publish(folder)
    return StoreReceiver(
        ModuleTarget(net()), folder, store=StoreOptions(mac_key=SecretBytes(b"key"))
    )


def of_several_runs(folder: Path) -> StoreReceiver:
    publish(folder)
    publish(folder, "other")
    return StoreReceiver(ModuleTarget(net()), folder)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (of_another_dtype, LayoutMismatch, "wire_dtypes"),
        (of_a_key, MacMismatch, "not signed"),
        (of_several_runs, SeveralRuns, "name one"),
    ],
)
def test_who_waits_for_a_version_is_told_what_is_permanent(
    tmp_path: Path,
    make: Callable[[Path], StoreReceiver],
    kind: type[DeltaSyncError],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make(tmp_path) as receiver, receiver.follow() as follower:
        with pytest.raises(kind, match=text):
            follower.wait_staged(timeout_s=60)
        for call in (follower.is_staged, follower.commit):
            with pytest.raises(kind, match=text):
                call()
        assert isinstance(follower.last_error, kind)
    assert [record.message for record in caplog.records if "ends, after" in record.message]


def test_what_is_permanent_is_told_to_an_engine_that_holds_a_version_and_loses_nothing(
    tmp_path: Path,
) -> None:
    wire, engine = {"*": "bfloat16"}, net(torch.bfloat16)
    model = publish(tmp_path, wire_dtypes=wire)
    with StoreReceiver(ModuleTarget(engine), tmp_path) as receiver:
        with receiver.follow() as follower:
            assert follower.wait_staged(timeout_s=60)
            follower.commit()
            held = engine.weight.clone()
            assert torch.equal(held, model.weight.bfloat16())
            publish(tmp_path)
            with pytest.raises(LayoutMismatch, match="wire_dtypes"):
                follower.wait_staged(timeout_s=60)
        receiver.check_serving()
        assert torch.equal(engine.weight, held)
        mended = publish(tmp_path, wire_dtypes=wire)
        with receiver.follow() as follower:
            assert follower.wait_staged(timeout_s=60)
            assert follower.commit() == 3
    assert torch.equal(engine.weight, mended.weight.bfloat16())


def test_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    engine = net()
    receiver = StoreReceiver(ModuleTarget(engine), tmp_path / "later")
    with receiver, StagingThread(receiver) as follower:
        assert not follower.wait_staged(timeout_s=1)
        assert isinstance(follower.last_error, StoreRefused)  # there is no folder yet
        model = publish(tmp_path / "later")
        assert follower.wait_staged(timeout_s=60)
        follower.commit()
    assert torch.equal(engine.weight, model.weight)


@pytest.mark.parametrize(("bytes_per_s", "most"), [(None, 11), (10_000.0, 3)])
def test_what_nothing_but_another_version_mends_is_tried_less_and_less_often(
    s3: str, bytes_per_s: float | None, most: int
) -> None:
    """The more seldom the longer it takes, so that it does not load the link."""
    near = s3_place(s3)
    trainer = Publisher(near)
    trainer.publish()
    objects = Objects(near.url, near.options).under(RUN)
    (anchor,) = (facts for facts in objects.listed("objects") if "-anchor-" in facts.key)
    objects.put(anchor.key, bytes(anchor.num_bytes))
    asked = list[str]()
    with faulty(s3) as (endpoint, faults):
        config = near.options.config | {"endpoint": endpoint}
        far = Place(near.url, near.options.model_copy(update={"config": config}))
        follower = Follower(far)

        def note(method: str, path: str) -> None:
            if method == "GET" and "-anchor-" in path:
                asked.append(path)

        faults.choose, faults.bytes_per_s = note, bytes_per_s
        with follower.receiver, follower.receiver.follow() as thread:
            wait_until(lambda: thread.last_error, timeout_s=60)
            assert not thread.wait_staged(timeout_s=6)
            assert isinstance(thread.last_error, ObjectDamaged)
            assert 1 <= len(asked) <= most
            faults.bytes_per_s = None
            again = Publisher(near, model=small_model(2))  # with an anchor
            again.publish()
            assert thread.wait_staged(timeout_s=60)
            assert thread.commit() == 2
            assert follower.holds(again.states[2])


def test_what_depends_on_others_or_on_the_machine_is_not_permanent() -> None:
    full = ConfigError("no space")
    full.__cause__ = OSError(28, "No space left on device")
    refused = [Refused(kind=kind, message="") for kind in ("LayoutMismatch", "ConfigError")]
    told = [is_permanent(one) for one in (ConfigError(""), full, *refused, PeerLost(""), None)]
    assert told == [True, False, True, False, False, False]


def test_a_run_that_a_narrower_dtype_would_help_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    for name, options in (("wide", {}), ("narrow", {"wire_dtypes": {"*": "bfloat16"}})):
        model, more = net(), SenderOptions.model_validate({"stream_id": name, **options})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        sender = StoreSender(ModuleSource(model), tmp_path, options=more)
        for _ in range(4):
            model(torch.randn(8, 64)).square().sum().backward()
            with caplog.at_level(logging.WARNING):
                stats = sender.publish()
            told += [text for text in stats.warnings if "wire_dtypes" in text]
            optimizer.step()
    assert len(told) == 1
    assert "of the elements changed" in told[0]
    assert [record for record in caplog.records if told[0] in record.message]
