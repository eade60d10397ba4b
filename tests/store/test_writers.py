"""Stores that fail, and writers that die or meet others: what is published is right and whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltasync import SenderOptions
from deltasync.errors import (
    ObjectDamaged,
    StoreError,
    StoreUnavailable,
    WriterConflict,
)
from deltasync.integrations.streamed import StreamedWeights
from deltasync.store import keys
from deltasync.store.objects import Objects
from deltasync.store.retention import GcStats, gc
from deltasync.testing.links import within
from tests.worlds.faults import FAULTS
from tests.worlds.links import AMPLE_S
from tests.worlds.published import (
    RUN,
    Follower,
    Publisher,
    assert_published,
    change,
    matrix,
    odd_model,
    small_model,
    state_of,
)
from tests.worlds.stores import Link, Place


def collect(place: Place, **more: object) -> GcStats:
    """What a collector does to whom nothing is too young."""
    how = {"keep": 99, "keep_s": 0} | more
    return gc(place.url, options=place.options, **how)  # type: ignore[arg-type]


def objects_of(place: Place) -> Objects:
    return Objects(place.url, place.options)


def keys_of(place: Place) -> set[str]:
    return {facts.key for facts in objects_of(place).listed("")}


def versions_of(place: Place) -> list[int]:
    return sorted(
        keys.version_of(facts.key) or 0 for facts in objects_of(place).listed("manifests")
    )


def collected(place: Place, path: str) -> None:
    assert collect(place).unfinished == 1


def altered(place: Place, path: str) -> None:
    objects_of(place).write(path.partition("/models/")[2], lambda: [b"half"])


def passed(place: Place, path: str) -> None:
    Publisher(place, anchor_every=2, model=small_model(2)).publish(4)
    collect(place, keep=1)


@dataclass
class Case:
    """What happens while a version is published, and what comes of it.

    Attributes:
        methods, part: Of the requests to which it happens: the first one, or all.
        happens: A fault, or what somebody else does before the request is answered.
        held: Versions that are published before.
        error, text: Of the call; None if it returns.
        left: Versions in the store then.
        collects: What a collector finds unfinished then; None if there is none.
        then: The version that the next call publishes; None if it raises the same.
    """

    methods: str
    part: str
    happens: str | Callable[[Place, str], None]
    error: type[StoreError] | None = None
    text: str = "."
    left: tuple[int, ...] = (1,)
    then: int | None = 2
    once: bool = True
    held: int = 1
    collects: int | None = None


def unanswered(arrives: bool, **more: object) -> Case:
    """Of a manifest nobody hears what became of it."""
    how = {"left": (1, 2) if arrives else (1,), "then": 3, "once": False} | more
    fault = "lost answer" if arrives else "lost request"
    return Case("PUT GET", "/manifests/", fault, StoreUnavailable, "try again", **how)  # type: ignore[arg-type]


HEAD, SECOND = "/objects/0000000000000002-delta-", "publish again"
CASES = {
    **{fault: Case("PUT", "/manifests/", fault, left=(1, 2), then=3) for fault in FAULTS},
    "answer lost": unanswered(True, collects=0),
    "request lost, collected": unanswered(False, collects=1, then=2),
    "first, collected": unanswered(False, held=0, left=(), collects=1, then=1),
    "slept": Case("HEAD", HEAD, collected, ObjectDamaged, SECOND),
    "altered": Case("HEAD", HEAD, altered, ObjectDamaged, SECOND),
    "upload": Case("PUT POST", HEAD, "error", StoreUnavailable, once=False),
    "first passed": Case(
        *("PUT POST", "-anchor-", passed, WriterConflict, "one trainer"),
        held=0,
        left=(3, 4),
        then=None,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_s02_s03_what_fails_while_a_version_is_published_is_mended_by_the_next(
    link: Link, case: Case
) -> None:
    hit = list[str]()

    def choose(method: str, path: str) -> str | None:
        if method not in case.methods or case.part not in path or (case.once and hit):
            return None
        hit.append(path)
        if isinstance(case.happens, str):
            return case.happens
        return case.happens(link.near, path)

    # What others do before the answer may take long; it is no fault, and not asked for again.
    timeout_s = 2.0 if isinstance(case.happens, str) else AMPLE_S
    far = link.far.having(timeout_s=timeout_s, retries=3, retry_timeout_s=4 * timeout_s)
    link.faults.slow_s = 3.0
    trainer = Publisher(far)
    trainer.publish(case.held)
    change(trainer.model)
    link.faults.choose = choose
    tried = state_of(trainer.model)
    if case.error is None:
        trainer.put()
    else:
        with pytest.raises(case.error, match=case.text):
            trainer.put()
    link.faults.choose = lambda method, path: None
    assert hit
    assert tuple(versions_of(link.near)) == case.left
    if case.collects is not None:
        assert collect(link.near).unfinished == case.collects
    change(trainer.model)
    if case.then is None:
        before = keys_of(link.near)
        with pytest.raises(case.error or StoreError):
            trainer.put()
        assert keys_of(link.near) == before
        return
    assert trainer.put().version == case.then
    if case.then > case.held + 1:
        trainer.states[case.held + 1] = tried
    assert_published(trainer, link.near)


def test_s03_streamed_weights_are_all_sent_after_a_manifest_without_an_answer(link: Link) -> None:
    """What has come since was compared with the version before it."""
    weights = StreamedWeights(SenderOptions(stream_id=RUN))
    trainer = Publisher(link.far.having(retries=0), model=matrix(64))
    trainer.start(weights)
    for version in range(1, 5):
        change(trainer.model)
        weights.take(trainer.model.state_dict().items())
        if version != 3:
            trainer.put()
            continue
        trainer.states[3] = state_of(trainer.model)
        link.faults.choose = lambda method, path: (
            "lost answer" if method in ("PUT", "GET") and "/manifests/" in path else None
        )
        with pytest.raises(StoreUnavailable):
            trainer.put()
        link.faults.choose = lambda method, path: None
    assert trainer.stats[4].kind == "anchor"
    assert_published(trainer, link.near)


def test_s08_an_anchor_that_fails_comes_later(link: Link) -> None:
    trainer = Publisher(link.far.having(retries=1), anchor_every=2)
    trainer.publish(2)
    assert not trainer.stats[2].anchor_bytes
    link.faults.choose = lambda method, path: "error" if "0003-anchor-" in path else None
    trainer.publish(2)
    assert (trainer.stats[3].anchor_bytes, trainer.stats[4].postponed) == (0, "")
    assert "StoreUnavailable" in trainer.stats[3].postponed
    assert trainer.stats[4].anchor_bytes
    assert_published(trainer, link.near)


def test_s03_an_upload_that_is_named_while_gc_runs_stays(link: Link) -> None:
    trainer = Publisher(link.far.having(retries=1))
    trainer.publish()
    objects_of(link.near).write(keys.frames_key(1), lambda: [b"half"])  # which gc meets first
    change(trainer.model)
    link.faults.choose = lambda method, path: (
        "lost request" if method == "PUT" and "/manifests/" in path else None
    )
    with pytest.raises(StoreUnavailable):
        trainer.put()
    link.faults.choose = lambda method, path: None
    collect(link.near, advance=lambda _: trainer.put() if trainer.sender.version == 1 else None)
    assert versions_of(link.near) == [1, 2, 3]
    assert_published(trainer, link.near)


def test_s02_a_manifest_comes_after_what_it_names_and_stays_as_it_is(link: Link) -> None:
    puts, trainer = list[str](), Publisher(link.far, anchor_every=2)
    link.faults.choose = lambda method, path: (
        puts.append(path.partition("/models/")[2].partition("?")[0])
        if method in ("PUT", "POST")
        else None
    )
    run, seen = objects_of(link.near), dict[str, bytes | None]()
    for version in range(1, 6):
        trainer.publish()
        key = keys.manifest_key(version)
        at = puts.index(key)
        assert puts.count(key) == 1
        there = {
            facts.key for facts in run.listed("objects") if keys.version_of(facts.key) == version
        }
        (first,) = there & set(puts[:at])
        assert ("-anchor-" if version == 1 else "-delta-") in first
        assert any(one.startswith("layouts/") for one in puts[:at])
        seen[key] = run.get(key, max_bytes=1 << 20)
        assert seen == {one: run.get(one, max_bytes=1 << 20) for one in seen}


@pytest.mark.parametrize("how", ["published", "garbage", "published and collected"])
def test_s03_of_two_writers_the_second_is_told_and_changes_nothing(place: Place, how: str) -> None:
    slept, other = Publisher(place), Publisher(place, anchor_every=2)
    slept.publish()
    if how == "garbage":
        assert objects_of(place).create(keys.manifest_key(2), b"whatever it is")
    else:
        other.states, count = {0: {}}, 6 if how.endswith("collected") else 1
        other.publish(count)
    if how.endswith("collected"):
        collect(place, keep=1)
    before = keys_of(place)
    for _ in range(2):
        with pytest.raises(WriterConflict, match="published v2: let one trainer"):
            slept.publish()
    (upload,) = keys_of(place) - before
    assert upload.startswith(f"objects/{2:016}-")
    if how == "published":
        assert_published(other)


def test_a_store_that_never_answers_is_given_up(link: Link) -> None:
    link.faults.slow_s, link.faults.choose = 100.0, lambda method, path: "slow"
    with within(90), pytest.raises(StoreUnavailable):
        objects_of(link.far.having(timeout_s=0.3, retries=1)).get("a", max_bytes=1)


def test_s05_a_version_that_was_published_is_what_the_trainer_had_through_all_of_a_run(
    place: Place, tmp_path: Path
) -> None:
    """Anchors and deltas, without a change, of a trainer that starts again, of another model."""
    trainer = Publisher(
        place, anchor_every=3, model=odd_model(), publishing={"anchor_file_bytes": 600_000}
    )
    trainer.publish(5)
    trainer.put()
    assert (trainer.stats[6].nnz, trainer.stats[6].density) == (0, 0.0)
    anchors = [version for version, stats in trainer.stats.items() if stats.anchor_bytes]
    assert (anchors, {stats.postponed for stats in trainer.stats.values()}) == ([1, 4], {""})
    trainer.start()
    again = trainer.put()
    assert (again.kind, again.version, again.delta_bytes) == ("unchanged", 6, 0)
    trainer.publish()
    trainer.start()  # after a step that was never published
    change(trainer.model)
    trainer.put()
    found = [(stats.kind, stats.base_version) for stats in list(trainer.stats.values())[-2:]]
    assert found == [("delta", 6), ("anchor", None)]
    assert_published(trainer)
    other = Publisher(place)
    assert (other.put().kind, max(other.states)) == ("anchor", 9)
    with Follower(place) as reader:
        assert reader.fetch() == 9
        assert reader.holds(other.states[9])


def test_s02_s03_of_writers_at_once_one_goes_on(place: Place) -> None:
    writers, goes_on = [Publisher(place, model=small_model(n)) for n in range(4)], threading.Event()
    ends, lock = list[int](), threading.Lock()

    def write(number: int) -> None:
        try:
            while not goes_on.is_set() or max(writers[number].states, default=0) < last[0]:
                writers[number].publish()
        except WriterConflict:
            with lock:
                ends.append(number)
                if len(ends) == 3:
                    last[0] = max(max(one.states, default=0) for one in writers) + 2
                    goes_on.set()

    last = [0]
    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(set(ends)) == 3
    claimed = [version for one in writers for version in one.states]
    assert sorted(claimed) == versions_of(place) == list(range(1, max(claimed) + 1))
    for one in writers:
        one.states = {version: one.states[version] for version in list(one.states)[-2:]}
        assert_published(one)
