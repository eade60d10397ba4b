"""Versions through a store behind a slow link, at toy size; how long it takes is not asserted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.codec.pairs import Pair, pairs
from benchmarks.store.record import StoreRecord, append_records, read_records
from benchmarks.store.report import make_markdown, make_table
from benchmarks.store.runner import CODINGS, PLANS, Link, WrongWeights, measure_pair
from benchmarks.store.ways import Checkpoint, PatchedFile


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
