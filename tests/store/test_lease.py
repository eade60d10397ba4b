"""Leases: written when they are needed, in spite of what fails for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deltasync.store.catalogue import Run
from deltasync.store.lease import Leaseholder
from deltasync.store.objects import Objects, StoreOptions
from tests.store.faulty import faulty
from tests.store.stores import s3_place


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass."""
    passed, real = [0.0], time.monotonic

    def advance(seconds: float) -> None:
        passed[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])
    return advance


def leases(objects: Objects) -> list[str]:
    return [one.key for one in objects.listed("leases")]


def test_a_store_without_an_answer_is_asked_again(
    s3: str, clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    with faulty(s3) as (endpoint, faults):
        place = s3_place(s3, via=endpoint)
        options = StoreOptions(config=place.options.config, timeout_s=1, retries=0)
        objects = Objects(place.url, options)
        holder = Leaseholder(Run(objects, "run"))
        faults.choose = lambda method, path: "error"
        holder.refresh(holds=None, version=1)
        faults.choose = lambda method, path: None
        holder.refresh(holds=None, version=1)
        assert leases(objects) == []
        clock(40)
        holder.refresh(holds=None, version=1)
        assert len(leases(objects)) == 1
        holder.drop()
        assert leases(objects) == []
    assert caplog.text.count("without a lease") == 1


def test_a_lease_is_written_again_before_it_ends(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    objects = Objects(tmp_path)
    holder = Leaseholder(Run(objects, "run"))
    holder.refresh(holds=3, version=5)
    [key] = leases(objects)
    (tmp_path / key).unlink()
    holder.refresh(holds=3, version=5)
    assert leases(objects) == []
    clock(1300)
    holder.refresh(holds=3, version=5)
    assert leases(objects) == [key]
