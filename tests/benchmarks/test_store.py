"""Versions through a store behind a slow link, at toy size; how long it takes is not asserted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks.codec.pairs import Pair, pairs
from benchmarks.store.record import StoreRecord, append_records, read_records
from benchmarks.store.report import make_markdown, make_table
from benchmarks.store.runner import CODINGS, PLANS, Link, WrongWeights, measure_pair
from benchmarks.store.ways import Checkpoint, PatchedFile
from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreReceiver, StoreSender
from deltasync.delta.codecs.choosing import CODING_COSTS, Work, predicted_s
from tests.sync.harness import bits_equal
from tests.sync.test_coded import model, nudged


@pytest.fixture(scope="module")
def pair() -> Pair:
    (made,) = pairs("tiny", PLANS["tiny"].pairs)
    return made


@pytest.fixture(scope="module")
def records(pair: Pair) -> list[StoreRecord]:
    with ExitStack() as stack:
        return list(measure_pair(pair, Link(stack), {1e9: 2}))


def test_every_way_is_measured(records: list[StoreRecord]) -> None:
    names = [f"deltasync, {coding}" for coding in CODINGS]
    assert [record.way for record in records] == [*names, Checkpoint.name, PatchedFile.name]
    assert all(len(record.samples) == 2 for record in records)


def test_the_link_counts_bytes(records: list[StoreRecord]) -> None:
    (whole,) = (record for record in records if record.way == Checkpoint.name)
    assert whole.dense_bytes < whole.up_bytes < 1.2 * whole.dense_bytes
    assert whole.dense_bytes < whole.down_bytes < 1.2 * whole.dense_bytes
    assert all(0 < record.down_bytes <= whole.down_bytes for record in records)


def test_weights_that_did_not_arrive_are_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "fetch", lambda way: None)
    with ExitStack() as stack, pytest.raises(WrongWeights, match="whole checkpoint"):
        list(measure_pair(pair, Link(stack), {1e9: 1}))


def test_records_come_back_and_are_shown(records: list[StoreRecord], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert list(append_records(path, records)) == records
    assert read_records(path) == records
    assert make_table(records).row_count == len(records) + 1
    assert all(record.way in make_markdown(records) for record in records)


@pytest.mark.parametrize("bits_per_s", [2e7, 2e8])
def test_a_sender_to_a_store_learns_the_speed_of_its_link(bits_per_s: float) -> None:
    """And its choice is near the best one for the link as it is."""
    trainer = model(1, 3_000_000)
    with ExitStack() as stack:
        link = Link(stack)
        link.set(bits_per_s)
        sender = StoreSender(
            ModuleSource(trainer),
            "s3://bench/auto",
            options=SenderOptions(compression="auto"),
            store=link.store,
        )
        assert sender.publish().kind == "anchor"
        for seed in range(2):
            nudged(trainer.get_parameter("a").data, 0.05, torch.Generator().manual_seed(seed))
            stats = sender.publish()
            work = Work(stats.nnz, stats.numel, 6 * stats.nnz, 6 * stats.nnz, is_full=False)
            costs, speed = CODING_COSTS["cpu"], bits_per_s / 8
            best = min(predicted_s(coding, work, speed, costs) for coding in costs.deltas)
            assert predicted_s(stats.compression, work, speed, costs) <= 1.1 * best
        assert stats.link_gbit_s is not None
        assert stats.link_gbit_s < 2e-9 * bits_per_s
        engine = model(2, 3_000_000)
        link.set(None)
        with StoreReceiver(ModuleTarget(engine), sender.url, store=link.store) as receiver:
            assert receiver.fetch() == 3
        assert bits_equal(trainer, engine)
