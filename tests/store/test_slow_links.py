"""Objects that take seconds to come, or are deleted meanwhile, and errors that do not pass."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from deltasync.errors import (
    ConfigError,
    LayoutMismatch,
    MacMismatch,
    ObjectDamaged,
    PeerLost,
    Refused,
    StoreRefused,
    StoreUnavailable,
    TransportTimeout,
    is_permanent,
)
from tests.cli.command import ENVIRONMENT
from tests.store.test_writers import collect, objects_of, versions_of
from tests.worlds.programs import Program
from tests.worlds.published import Follower, Publisher, change, matrix, small_model
from tests.worlds.stores import Link, full_disk, local_place, wait_until

NUM_BYTES = 2 * 2048 * 2048  # 8 MB
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


@pytest.fixture
def trainer(link: Link) -> Publisher:
    """A run whose newest version is an anchor of 8 MB, behind a link of 6 MB a second."""
    made = Publisher(link.near, model=matrix(), anchor_every=1)
    made.publish()
    link.faults.bytes_per_s = 6e6
    return made


def reader_of(link: Link, spool: Path | None = None) -> Follower:
    return Follower(link.far, model=matrix(), more={"spool": spool})


def add(model: nn.Module) -> None:
    """Change all of a model, so that the new anchor is a cheaper way."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def test_a_follower_gets_a_version_that_takes_seconds_and_each_byte_once(
    link: Link, trainer: Publisher
) -> None:
    """One that ends does not wait for all of them, and the next one goes on."""
    counts: list[int] = []
    rates: list[float] = []

    def advanced(_: int) -> None:
        counts.append(progress.fetched_bytes)
        rates.append(progress.bytes_per_s)

    link.faults.bytes_per_s = 200_000
    with reader_of(link) as reader:
        progress = reader.receiver.progress
        progress.advanced = advanced
        with reader.receiver.follow():
            wait_until(lambda: progress.fetched_bytes > 0, timeout_s=60)
        assert progress.fetched_bytes < NUM_BYTES
        link.faults.bytes_per_s = 6e6
        with reader.receiver.follow() as follower:
            for version in (1, 2):
                while not follower.wait_staged(timeout_s=60):
                    assert follower.last_error is None
                assert follower.commit() == version
                assert reader.holds(trainer.states[version])
                trainer.publish(step=add)
    assert link.faults.down_bytes < 2.3 * NUM_BYTES
    assert counts[:4] == sorted(counts[:4])
    assert 0 < max(rates) < 60e6, "what is kept has no rate"


def test_calls_that_break_off_go_on_and_arrive_though_each_time_there_is_a_newer_version(
    link: Link, trainer: Publisher
) -> None:
    """An engine that sleeps at each step, before all has come, and a trainer that goes on."""
    link.faults.bytes_per_s = None
    limit, came = 0, list[int]()

    def advanced(_: int) -> None:
        if limit < reader.fetched < NUM_BYTES:
            came.append(reader.fetched)
            reader.receiver.break_off()

    with reader_of(link) as reader:
        reader.receiver.progress.advanced = advanced
        for calls in range(9):
            limit = calls * NUM_BYTES // 5
            try:
                reader.stage()
                break
            except TransportTimeout:
                trainer.publish(step=add)
        assert reader.receiver.commit() == 1
        assert reader.holds(trainer.states[1])
        limit = NUM_BYTES
        reader.stage()
        assert reader.receiver.commit() == max(trainer.states)
        assert reader.holds(trainer.states[max(trainer.states)])
    assert came == sorted(came)
    assert len(set(came)) > 1


def test_an_attempt_that_the_store_ends_leaves_what_has_come_to_the_next(
    link: Link, trainer: Publisher
) -> None:
    """It hangs up in the midst of a part, when some have come."""

    def choose(method: str, path: str) -> str | None:
        return "cut" if method == "GET" and "-anchor-" in path and reader.fetched else None

    link.faults.bytes_per_s, link.faults.choose = None, choose
    with Follower(link.far.having(retries=0), model=matrix()) as reader:
        with pytest.raises(StoreUnavailable):
            reader.stage()
        kept, told = reader.fetched, list[int]()
        link.faults.choose = lambda method, path: None
        reader.receiver.progress.advanced = lambda _: told.append(reader.fetched)
        reader.fetch()
        assert reader.holds(trainer.states[1])
        assert reader.fetched == reader.receiver.progress.total_bytes
    assert told[0] == kept > 0


def test_a_reader_that_was_killed_leaves_what_has_come_to_the_next(
    link: Link, trainer: Publisher, tmp_path: Path
) -> None:
    options = link.far.options.model_dump_json()
    with Program(READER, link.far.url, options, tmp_path, environment=ENVIRONMENT) as process:
        fetched = next(n for n in map(int, process.stdout) if n > NUM_BYTES // 2)
        process.kill()
    link.faults.bytes_per_s = None
    told: list[int] = []
    with reader_of(link, tmp_path) as reader:
        reader.receiver.progress.advanced = lambda _: told.append(reader.fetched)
        reader.fetch()
        assert reader.holds(trainer.states[1])
    assert told[0] >= fetched
    assert not list(tmp_path.iterdir())


# Readers that fall behind what is kept


@pytest.mark.promise(
    "Cost",
    "A reader whose objects are deleted while it fetches them goes on with the newest "
    "version, and never mixes two.",
)
def test_a_slow_reader_goes_on_with_the_newest_version(link: Link) -> None:
    """The delta from the version held is deleted while it comes, and that version, too."""
    trainer, asked = Publisher(link.near, model=matrix(1024), anchor_every=4), threading.Event()

    def choose(method: str, path: str) -> None:
        """Bring next to nothing, once the object is asked for."""
        if method == "GET" and f"{3:016}-delta-" in path:
            link.faults.bytes_per_s = 1_000
            asked.set()

    def step(model: nn.Module) -> None:
        change(model, share=0.4)

    trainer.publish(2, step=step)
    link.faults.choose = choose
    with Follower(link.far, model=matrix(1024)) as reader, reader.receiver.follow() as follower:
        assert follower.wait_staged(timeout_s=60)
        assert follower.commit() == 2
        trainer.publish(step=step)
        assert asked.wait(60)
        trainer.publish(3, step=step)
        collect(link.near, keep=1)
        assert 3 not in versions_of(link.near)
        link.faults.choose, link.faults.bytes_per_s = lambda method, path: None, None
        assert follower.wait_staged(timeout_s=60)
        assert follower.commit() == 6
        assert reader.holds(trainer.states[6])


def test_s10_a_reader_goes_past_a_list_that_is_late(link: Link) -> None:
    trainer = Publisher(link.near)
    trainer.publish(2)
    link.faults.lists = {}
    assert versions_of(link.far) == [1, 2]
    trainer.publish(2)
    with Follower(link.far) as reader:
        assert reader.fetch() == 4
        assert reader.holds(trainer.states[4])
    assert versions_of(link.far) == [1, 2]


# Errors that no second attempt repairs


def test_a_store_that_takes_long_for_any_part_is_asked_for_large_ones(link: Link) -> None:
    """Or what it takes for each would be all that a fetch takes."""
    trainer, parts = Publisher(link.near, model=matrix(1024)), list[str]()
    trainer.publish()

    def choose(method: str, path: str) -> str | None:
        if method != "GET" or "-anchor-" not in path:
            return None
        parts.append(path)
        return "slow"

    link.faults.choose, link.faults.slow_s = choose, 2.2
    with Follower(link.far, model=matrix(1024)) as reader:
        reader.stage()
        reader.receiver.commit()
        assert reader.holds(trainer.states[1])
    assert len(parts) <= 7


def test_what_was_kept_and_is_damaged_is_fetched_again(
    link: Link, trainer: Publisher, tmp_path: Path
) -> None:
    with reader_of(link, tmp_path) as reader:
        reader.receiver.progress.advanced = lambda _: reader.receiver.break_off()
        with pytest.raises(TransportTimeout, match="goes on from there"):
            reader.fetch()
    [kept] = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    link.faults.bytes_per_s = None
    with reader_of(link, tmp_path) as reader:
        reader.fetch()
        assert reader.fetched == reader.receiver.progress.total_bytes
        assert reader.holds(trainer.states[1])


def test_a_full_disk_does_not_load_the_link(link: Link, trainer: Publisher, tmp_path: Path) -> None:
    """Each attempt asks for little while there is no room, and the first one after that ends."""
    link.faults.bytes_per_s = None
    with reader_of(link, tmp_path) as reader:
        with full_disk(NUM_BYTES // 2):
            for _ in range(5):
                with pytest.raises(ConfigError, match="free some space"):
                    reader.stage()
        reader.fetch()
        assert reader.holds(trainer.states[1])
    assert link.faults.down_bytes < 2 * NUM_BYTES


def test_what_is_permanent_loses_nothing_and_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    engine, wire = small_model(1).bfloat16(), {"wire_dtypes": {"*": "bfloat16"}}
    place = local_place(tmp_path / "later")
    with Follower(place, model=engine) as reader:
        with reader.receiver.follow() as follower:
            assert not follower.wait_staged(timeout_s=0.5)
            assert isinstance(follower.last_error, StoreRefused)  # there is no folder yet
            trainer = Publisher(place, model=small_model().float(), options=wire)
            trainer.publish()
            assert follower.wait_staged(timeout_s=60)
            assert follower.commit() == 1
            held = {name: one.bfloat16() for name, one in trainer.states[1].items()}
            Publisher(place, model=trainer.model).publish()
            with pytest.raises(LayoutMismatch, match="wire_dtypes"):
                follower.wait_staged(timeout_s=60)
        reader.receiver.check_serving()
        assert reader.holds(held)
        trainer.start()
        trainer.publish(step=add)
        with reader.receiver.follow() as follower:
            assert follower.wait_staged(timeout_s=60)
            assert follower.commit() == 3
        assert reader.holds({name: one.bfloat16() for name, one in trainer.states[3].items()})


def test_what_nothing_but_another_version_mends_is_tried_less_and_less_often(link: Link) -> None:
    trainer, asked = Publisher(link.near), list[str]()
    trainer.publish()
    (anchor,) = (f for f in objects_of(link.near).listed("objects") if "-anchor-" in f.key)
    objects_of(link.near).write(anchor.key, lambda: [bytes(anchor.num_bytes)])
    link.faults.choose = lambda method, path: (
        asked.append(path) if method == "GET" and "-anchor-" in path else None
    )
    with Follower(link.far) as reader, reader.receiver.follow() as thread:
        wait_until(lambda: thread.last_error, timeout_s=60)
        assert not thread.wait_staged(timeout_s=2)
        assert isinstance(thread.last_error, ObjectDamaged)
        assert 1 <= len(asked) <= 8
        again = Publisher(link.near, model=small_model(2))  # with an anchor
        again.publish()
        assert thread.wait_staged(timeout_s=60)
        assert thread.commit() == 2
        assert reader.holds(again.states[2])


def test_what_depends_on_others_or_on_the_machine_is_not_permanent() -> None:
    full = ConfigError("no space")
    full.__cause__ = OSError(28, "No space left on device")
    refused = [Refused(kind=kind, message="") for kind in ("LayoutMismatch", "ConfigError")]
    found = [ConfigError(""), MacMismatch(""), full, *refused, PeerLost(""), None]
    assert list(map(is_permanent, found)) == [True] * 2 + [False, True, False, False, False]


def test_a_run_that_a_narrower_dtype_would_help_says_so_once(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("weight").mul_(1 + 1e-6)

    said: list[str] = []
    for run, options in (("wide", {}), ("narrow", {"wire_dtypes": {"*": "bfloat16"}})):
        model = nn.Linear(64, 64)
        trainer = Publisher(local_place(tmp_path / run), model=model, options=options)
        trainer.publish(4, step=step)
        said += [text for one in trainer.stats.values() for text in one.warnings]
    (text,) = (text for text in said if "wire_dtypes" in text)
    assert "of the elements changed" in text
