"""Leases: written when they are needed, in spite of what fails for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deltasync.store.catalogue import Run
from deltasync.store.checkpoints import fetch_checkpoint
from deltasync.store.lease import Leaseholder
from deltasync.store.objects import Objects, StoreOptions
from tests.store.faulty import faulty
from tests.store.published import Follower, Publisher
from tests.store.stores import local_place, s3_place, wait_until


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


def test_a_reader_that_waits_for_versions_keeps_its_lease(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    place = local_place(tmp_path)
    Publisher(place).publish()
    reader = Follower(place)
    with reader.receiver, reader.receiver.follow() as follower:
        assert follower.wait_staged(timeout_s=30)
        assert follower.commit() == 1
        [lease] = (tmp_path / "run/leases").iterdir()
        lease.unlink()
        clock(1300)
        wait_until(lease.exists)
    assert not lease.exists()


def test_a_checkpoint_that_comes_slowly_keeps_its_lease(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    place = local_place(tmp_path / "store")
    Publisher(place).publish(2)
    found = list[bool]()

    def phase(name: str, num_bytes: int) -> Callable[[int], None]:
        """Loses the lease once, and lets an hour pass with each piece that comes."""
        folder = tmp_path / "store/run/leases"

        def advance(num_bytes: int) -> None:
            if name == "fetching":
                found.append(bool(list(folder.iterdir())))
                for lease in folder.iterdir():
                    lease.unlink()
                clock(1300)

        return advance

    fetch_checkpoint(place.url, tmp_path / "out", phase=phase)
    assert found == [True, True]
