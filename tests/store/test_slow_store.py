"""Objects that take seconds to come: a reader gets them whatever it waits for, and only once."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreReceiver, StoreSender
from deltasync.errors import ConfigError, StoreUnavailable, TransportTimeout
from deltasync.store.anchors import PublishOptions
from tests.cli.command import ENVIRONMENT
from tests.worlds.faults import Faults, faulty
from tests.worlds.stores import Place, s3_place, wait_until

SIDE, NUM_BYTES = 2048, 2 * 2048 * 2048  # 8 MB
RUN = "run"
READER = """
import sys, torch
from torch import nn
from deltasync import ModuleTarget, StoreReceiver
from deltasync.store.objects import StoreOptions
url, options, spool = sys.argv[1], StoreOptions.model_validate_json(sys.argv[2]), sys.argv[3]
engine = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
receiver = StoreReceiver(ModuleTarget(engine), url, store=options, spool=spool)
receiver.progress.advanced = lambda _: print(receiver.progress.fetched_bytes, flush=True)
receiver.fetch()
"""


def model() -> nn.Linear:
    return nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16)


class Slow:
    """A run whose newest version is an anchor of 8 MB, behind a link of 2 MB a second."""

    def __init__(self, place: Place, near: Place, faults: Faults) -> None:
        self.place, self.faults, self.trainer = place, faults, model()
        self.sender = StoreSender(
            ModuleSource(self.trainer),
            near.url,
            options=SenderOptions(stream_id=RUN),
            store=near.options,
            publishing=PublishOptions(anchor_every=1),
        )
        self.sender.publish()
        faults.bytes_per_s = 2e6

    def reader(self, spool: Path | None = None) -> tuple[nn.Linear, StoreReceiver]:
        engine = model()
        target = ModuleTarget(engine)
        place = self.place
        return engine, StoreReceiver(target, place.url, store=place.options, spool=spool)


@pytest.fixture
def slow(s3: str) -> Iterator[Slow]:
    near = s3_place(s3, part_bytes=5 << 20)  # the least: the anchor has several parts
    with faulty(s3) as (endpoint, faults):
        config = {**near.options.config, "endpoint": endpoint}
        far = Place(near.url, near.options.model_copy(update={"config": config}))
        yield Slow(far, near, faults)


def test_a_version_that_takes_seconds_to_fetch_is_followed(slow: Slow) -> None:
    engine, receiver = slow.reader()
    told: list[tuple[int, float]] = []
    progress = receiver.progress
    progress.advanced = lambda _: told.append((progress.fetched_bytes, progress.bytes_per_s))
    with receiver, receiver.follow() as follower:
        while not follower.wait_staged(timeout_s=60):
            assert follower.last_error is None
        assert follower.commit() == 1
        assert torch.equal(engine.weight, slow.trainer.weight)
        with torch.no_grad():
            slow.trainer.weight += 1
        slow.sender.publish()
        while not follower.wait_staged(timeout_s=60):
            assert follower.last_error is None
        assert follower.commit() == 2
    assert torch.equal(engine.weight, slow.trainer.weight)
    assert slow.faults.down_bytes < 2.2 * NUM_BYTES
    assert [done for done, _ in told[1:4]] == sorted(done for done, _ in told[1:4])
    assert all(rate > 0 for done, rate in told if done)


def test_calls_that_are_broken_off_go_on_where_the_last_one_ended(slow: Slow) -> None:
    engine, receiver = slow.reader()
    slow.faults.bytes_per_s = 8e6
    progress, came = receiver.progress, list[int]()

    def advanced(_: int) -> None:
        if progress.bytes_per_s and len(came) < 4:
            came.append(progress.fetched_bytes)
            receiver.break_off()

    progress.advanced = advanced
    with receiver:
        for _ in range(4):
            with pytest.raises(TransportTimeout, match="goes on from there"):
                receiver.fetch()
        receiver.fetch()
    assert torch.equal(engine.weight, slow.trainer.weight)
    assert came == sorted(set(came))


@pytest.mark.parametrize("is_newest", [True, False])
def test_a_reader_that_was_killed_leaves_what_has_come_to_the_next(
    slow: Slow, tmp_path: Path, is_newest: bool
) -> None:
    """Which fetches the newest version, and removes what that does not need."""
    url, options = slow.place.url, slow.place.options.model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", READER, url, options, str(tmp_path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        fetched = next(n for n in map(int, process.stdout) if n > NUM_BYTES // 2)
        process.kill()
    slow.faults.bytes_per_s = None
    if not is_newest:  # than which the new anchor is a cheaper way
        with torch.no_grad():
            slow.trainer.weight += 1
        slow.sender.publish()
    engine, receiver = slow.reader(tmp_path)
    told: list[int] = []
    receiver.progress.advanced = lambda _: told.append(receiver.progress.fetched_bytes)
    with receiver:
        assert receiver.fetch() == slow.sender.version
    assert (told[0] >= fetched) == is_newest
    assert torch.equal(engine.weight, slow.trainer.weight)
    assert not list(tmp_path.iterdir())


def test_what_was_kept_and_is_damaged_is_fetched_again(slow: Slow, tmp_path: Path) -> None:
    _, receiver = slow.reader(tmp_path)
    receiver.progress.advanced = lambda _: receiver.break_off()
    with receiver, pytest.raises(TransportTimeout, match="goes on from there"):
        receiver.fetch()
    [kept] = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    slow.faults.bytes_per_s = None
    engine, receiver = slow.reader(tmp_path)
    with receiver:
        receiver.fetch()
        progress = receiver.progress
        assert progress.fetched_bytes == progress.total_bytes
    assert torch.equal(engine.weight, slow.trainer.weight)


def test_a_follower_that_ends_does_not_wait_for_all_bytes(slow: Slow) -> None:
    slow.faults.bytes_per_s = 200_000
    _, receiver = slow.reader()
    with receiver:
        with receiver.follow():
            wait_until(lambda: receiver.progress.fetched_bytes > 0, timeout_s=60)
        assert receiver.progress.fetched_bytes < NUM_BYTES
        slow.faults.bytes_per_s = None
        with receiver.follow() as follower:
            assert follower.wait_staged(timeout_s=60)
            follower.commit()


def test_attempts_that_the_store_ends_do_not_begin_again(slow: Slow) -> None:
    slow.faults.bytes_per_s = None
    few = slow.place.options.model_copy(update={"retries": 0, "parallel": 1})
    engine = model()
    receiver = StoreReceiver(ModuleTarget(engine), slow.place.url, store=few)
    parts: list[str] = []

    def choose(method: str, path: str) -> str | None:
        if method != "GET" or "-anchor-" not in path:
            return None
        parts.append(path)
        return "error" if len(parts) % 2 == 0 else None

    slow.faults.choose = choose
    with receiver, receiver.follow() as follower:
        while not follower.wait_staged(timeout_s=60):
            pass
        follower.commit()
    assert torch.equal(engine.weight, slow.trainer.weight)
    assert slow.faults.down_bytes < 1.1 * NUM_BYTES
    assert slow.faults.met["error"] > 2


def test_a_link_that_brings_less_than_before_is_asked_for_less(slow: Slow) -> None:
    """Parts have become large, and such a part does not come any more."""
    slow.faults.bytes_per_s = None
    few = slow.place.options.model_copy(update={"retries": 0})
    engine, refused = model(), 0
    receiver = StoreReceiver(ModuleTarget(engine), slow.place.url, store=few)

    def advanced(_: int) -> None:
        slow.faults.most_bytes = 200_000

    receiver.progress.advanced = advanced
    with receiver:
        while refused < 100:
            try:
                receiver.stage()
                break
            except StoreUnavailable:
                refused += 1
        receiver.commit()
    assert refused
    assert torch.equal(engine.weight, slow.trainer.weight)


def test_calls_that_break_off_arrive_though_each_time_there_is_a_newer_version(slow: Slow) -> None:
    """An engine that sleeps at each step, before all has come, and a trainer that goes on."""
    slow.faults.bytes_per_s = None
    engine, receiver = slow.reader()
    first, limit, calls = slow.trainer.weight.clone(), 0, 0

    def advanced(_: int) -> None:
        if limit < receiver.progress.fetched_bytes < NUM_BYTES:
            receiver.break_off()

    receiver.progress.advanced = advanced
    with receiver:
        for calls in range(9):
            limit = calls * NUM_BYTES // 5
            try:
                receiver.stage()
                break
            except TransportTimeout:
                with torch.no_grad():
                    slow.trainer.weight += 1
                slow.sender.publish()
        assert receiver.commit() == 1
        assert torch.equal(engine.weight, first)
        limit = NUM_BYTES
        receiver.stage()
        assert receiver.commit() == slow.sender.version
    assert calls > 1
    assert torch.equal(engine.weight, slow.trainer.weight)


@pytest.mark.parametrize("versions", [1, 2])
def test_what_else_lies_in_a_spool_is_left_alone(tmp_path: Path, versions: int) -> None:
    """As what a network file system keeps of a file that another one replaced."""
    trainer, engine = model(), model()
    sender = StoreSender(ModuleSource(trainer), tmp_path / "store")
    spool = tmp_path / "spool"
    spool.mkdir()
    for _ in range(versions):
        sender.publish()
        with torch.no_grad():
            trainer.weight[0] += 1
        for is_last in (False, True):
            with StoreReceiver(ModuleTarget(engine), sender.url, spool=spool) as receiver:
                receiver.stage()
                if is_last:
                    receiver.commit()
            for file in [path for path in spool.rglob("*") if path.is_file()]:
                (file.parent / ".nfs0001").touch()
    with StoreReceiver(ModuleTarget(engine), sender.url) as receiver:
        assert receiver.fetch() == versions


def test_a_full_disk_does_not_load_the_link(slow: Slow, tmp_path: Path) -> None:
    """Each attempt asks for little while there is no room, and the first one after that ends."""
    slow.faults.bytes_per_s = None
    engine, receiver = slow.reader(tmp_path)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with receiver:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES // 2, former[1]))
            for _ in range(9):
                with pytest.raises(ConfigError, match="free some space"):
                    receiver.stage()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
            signal.signal(signal.SIGXFSZ, ignored)
        receiver.stage()
        receiver.commit()
    assert torch.equal(engine.weight, slow.trainer.weight)
    assert slow.faults.down_bytes < 2 * NUM_BYTES
