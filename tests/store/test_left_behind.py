"""Writers and readers that slept while a run went on, and was collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from deltasync import ModuleSource, SenderOptions, StoreSender
from deltasync.errors import StoreUnavailable, WriterConflict
from deltasync.store import keys
from deltasync.store.catalogue import Published
from deltasync.store.retention import gc
from deltasync.store.routes import find_route
from tests.store.test_sender import run_of
from tests.worlds.faults import Faults, faulty
from tests.worlds.published import RUN, Follower, Publisher, change, small_model
from tests.worlds.stores import Place, local_place, s3_place


@pytest.fixture
def link(s3: str) -> Iterator[tuple[Place, Place, Faults]]:
    """A bucket as it is, the same through a proxy, and what the proxy does."""
    with faulty(s3) as (endpoint, faults):
        near = s3_place(s3)
        config = near.options.config | {"endpoint": endpoint}
        yield near, Place(near.url, near.options.model_copy(update={"config": config})), faults


def collect(place: Place) -> None:
    gc(place.url, RUN, keep=1, keep_s=0, options=place.options)


def sender_of(model: nn.Module, place: Place) -> StoreSender:
    options = SenderOptions(stream_id=RUN)
    return StoreSender(ModuleSource(model), place.url, options=options, store=place.options)


@pytest.mark.parametrize("held", [1, 2])
def test_s03_a_writer_whose_next_version_was_published_and_collected_is_told(
    place: Place, held: int
) -> None:
    """Its manifest would be the only one of this version."""
    model = small_model()
    slept = sender_of(model, place)
    for _ in range(held):
        slept.publish()
    other = Publisher(place, anchor_every=2, model=small_model(2))
    other.publish(6)
    collect(place)
    before = {facts.key for facts in run_of(place).objects.listed("")}
    change(model)
    for _ in range(2):
        with pytest.raises(WriterConflict, match="one trainer"):
            slept.publish()
    assert {facts.key for facts in run_of(place).objects.listed("")} == before


def test_s03_a_first_version_that_was_passed_while_it_was_uploaded_is_none(
    link: tuple[Place, Place, Faults],
) -> None:
    near, far, faults = link
    slept = sender_of(small_model(), far)
    begun: list[str] = []

    def sleep(method: str, path: str) -> None:
        if method in ("PUT", "POST") and "-anchor-" in path and not begun:
            begun.append(path)
            Publisher(near, anchor_every=2, model=small_model(2)).publish(4)
            collect(near)

    faults.choose = sleep
    with pytest.raises(WriterConflict, match="one trainer"):
        slept.publish()
    assert begun
    assert 1 not in run_of(near).versions()


def test_a_writer_to_whom_only_what_is_gone_is_listed_begins_no_second_chain(
    link: tuple[Place, Place, Faults],
) -> None:
    near, far, faults = link
    trainer = Publisher(near, anchor_every=2)
    trainer.publish(2)
    faults.lists = {}
    assert run_of(far).versions() == [1, 2]
    trainer.publish(3)
    collect(near)
    assert run_of(near).versions() == [5]
    late = sender_of(small_model(2), far)
    with pytest.raises(StoreUnavailable, match="listed"):
        late.publish()
    assert run_of(near).versions() == [5]
    faults.lists = None
    assert late.publish().version == 6


def test_a_reader_that_slept_asks_for_few_manifests(link: tuple[Place, Place, Faults]) -> None:
    near, far, faults = link
    trainer, reader = Publisher(near, anchor_every=5), Follower(far)
    trainer.publish()
    reader.receiver.fetch()
    trainer.publish(40)
    asked = list[str]()

    def note(method: str, path: str) -> None:
        if f"/{keys.MANIFESTS}/" in path:
            asked.append(path)

    faults.choose = note
    assert reader.receiver.fetch() == 41
    assert reader.holds(trainer.states[41])
    assert len(asked) < 20
    reader.receiver.close()


def test_no_manifests_are_read_of_versions_that_no_reader_can_hold(tmp_path: Path) -> None:
    """All deltas since the anchor that is passed by have fewer bytes than one that is taken."""
    trainer = Publisher(local_place(tmp_path), anchor_every=5, model=small_model())
    trainer.publish(20, step=lambda model: None)
    run, asked = run_of(trainer.place), list[int]()
    target = run.require(20)

    def holds(published: Published) -> bool:
        asked.append(published.version)
        return False

    assert find_route(run, target, holds, oldest=14).steps[0].base is None
    assert min(asked) == 14
    asked.clear()
    find_route(run, target, holds)
    assert min(asked) < 14
