"""Relays: what is forwarded, to whom, and what happens when somebody is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from deltasync import (
    ModuleSource,
    ReceiverOptions,
    SenderOptions,
    WeightSender,
)
from deltasync.delta.codecs.coding import Coding
from deltasync.delta.shard import ShardSpec
from deltasync.dtypes import BY_NAME
from deltasync.errors import ConfigError, SyncAborted
from deltasync.sync.relay.relay import Relay
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import inprocess
from deltasync.wire.messages import ParameterSpec
from tests.sync.groups import trainer_of
from tests.sync.harness import Fleet, Model, Serving, bits_equal, fleet, random_model, step, until
from tests.sync.relays import region

pytestmark = pytest.mark.timeout(120)
SHAPES = {"a": (300, 7), "b": (11,), "c": (5000,), "empty": (0, 3), "scalar": ()}


def sent(made: Fleet, share: float = 0.05, seed: int = 0) -> int:
    """Change the weights and send them; returns the version."""
    step(made.source, torch.Generator().manual_seed(seed), share)
    return made.sender.send_weights(timeout_s=10).version


def send(made: Fleet) -> int:
    return made.sender.send_weights(timeout_s=10).version


def arrived(serving: Serving, version: int) -> None:
    until(lambda: serving.receiver.version == version and serving.receiver.state.name == "READY")


def test_a_relay_forwards_each_version_under_its_number() -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        assert send(made) == 1
        replicas = [random_model(SHAPES, 1), random_model(SHAPES, 2)]
        servings = [here.add(one, engine=f"e{n}") for n, one in enumerate(replicas)]
        for serving in servings:
            arrived(serving, 1)
        for number in range(4):
            version = sent(made, seed=number)
            for serving, replica in zip(servings, replicas, strict=True):
                arrived(serving, version)
                assert bits_equal(source, replica)
                assert serving.receiver._session.stream_id == made.sender.stream_id
        deltas = here.sent[-4:]
        assert [stats.kind for stats in deltas] == ["delta"] * 4
        assert all(not stats.lost for stats in deltas)


def test_late_joiners_get_a_full_sync_from_the_relay_alone() -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        send(made)
        first = here.add(random_model(SHAPES, 1), engine="first")
        arrived(first, 1)
        version = sent(made)
        arrived(first, version)
        late = random_model(SHAPES, 2)
        arrived(here.add(late, engine="late"), version)
        assert bits_equal(source, late)
        assert made.sender.version == version
        assert here.sent[-1].full_synced == 1
        assert here.relay.num_receivers == 2
        same = random_model(SHAPES, 0)
        same.load_state_dict(source.state_dict())
        arrived(here.add(same, engine="same"), version)
        assert (here.sent[-1].joined, here.sent[-1].full_synced) == (1, 0)
        version = sent(made, seed=5)
        arrived(here.serving["late/0"], version)
        assert bits_equal(source, late)


def test_receivers_join_a_relay_whose_trainer_is_gone() -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        send(made)
        until(lambda: here.relay.version == 1)
        made.sender.close()
        replica = random_model(SHAPES, 1)
        arrived(here.add(replica), 1)
        assert bits_equal(source, replica)


def test_relays_in_a_chain() -> None:
    source, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with (
        fleet(source) as made,
        region(made.transport.receiver()) as above,
        region(above.links[0].receiver()) as below,
    ):
        made.wait(1)
        send(made)
        serving = below.add(replica)
        arrived(serving, 1)
        for number in range(3):
            arrived(serving, sent(made, seed=number))
            assert bits_equal(source, replica)


def test_a_relay_of_its_own_receives_nothing_and_ends() -> None:
    link = inprocess.Sender()
    with Relay(link.receiver(), link) as relay:
        until(lambda: relay.forward(timeout_s=0.1) is not None or relay.last_error is not None)
        assert "let other engines connect" in str(relay.last_error)
        assert relay.version is None


def test_two_relays_of_one_name() -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as made, region(made.transport.receiver(), name="same") as first:
        made.wait(1)
        send(made)
        with region(made.transport.receiver(), name="same") as second:
            made.wait(2)
            sent(made)
            until(lambda: second.relay.last_error is not None)
            assert "an engine named 'same' is a member already" in str(second.relay.last_error)
            arrived(first.add(random_model(SHAPES, 1)), 2)


def test_a_trainer_of_another_run_takes_over() -> None:
    source, other = random_model(SHAPES, 0), random_model(SHAPES, 7)
    link = inprocess.Sender()
    replica = random_model(SHAPES, 1)
    with region(link.receiver()) as here, WeightSender(ModuleSource(source), link) as sender:
        sender.wait_for_receivers(1, timeout_s=5)
        for _ in range(3):
            sender.send_weights(timeout_s=5)
        serving = here.add(replica)
        arrived(serving, 3)
        # The same link serves the next run, as a port does that is listened on again.
        next_sender = WeightSender(ModuleSource(other), link)
        link.drop(0)
        next_sender.wait_for_receivers(1, timeout_s=5)
        next_sender.send_weights(timeout_s=5)
        until(lambda: serving.receiver._session.stream_id == next_sender.stream_id)
        arrived(serving, 1)
        assert bits_equal(other, replica)


def test_another_layout_takes_over() -> None:
    """Receivers below hold all that is sent, whatever that is."""
    source, other = random_model(SHAPES, 0), random_model({**SHAPES, "c": (4000,), "d": (3,)}, 7)
    link, target = inprocess.Sender(), CopiedTarget()
    with region(link.receiver()) as here, WeightSender(ModuleSource(source), link) as sender:
        sender.wait_for_receivers(1, timeout_s=5)
        sender.send_weights(timeout_s=5)
        serving = here.add(target)
        arrived(serving, 1)
        next_sender = WeightSender(ModuleSource(other), link)
        link.drop(0)
        next_sender.wait_for_receivers(1, timeout_s=5)
        next_sender.send_weights(timeout_s=5)
        until(lambda: serving.receiver._session.stream_id == next_sender.stream_id)
        arrived(serving, 1)
        assert bits_equal(other, Model(dict(target.tensors)))


@pytest.mark.parametrize("staged_bytes", [0, None])
def test_a_delta_that_is_written_as_it_comes_is_forwarded_as_a_full_sync(
    staged_bytes: int | None,
) -> None:
    source, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    options = ReceiverOptions(max_staged_bytes=staged_bytes)
    with fleet(source) as made, region(made.transport.receiver(), options=options) as here:
        made.wait(1)
        send(made)
        serving = here.add(replica)
        arrived(serving, 1)
        for number in range(3):
            arrived(serving, sent(made, seed=number))
            assert bits_equal(source, replica)
        full_synced = sum(stats.full_synced for stats in here.sent)
        assert full_synced == (4 if staged_bytes == 0 else 1)


def test_a_delta_beyond_what_is_kept_is_forwarded_as_a_full_sync() -> None:
    source, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with fleet(source) as made, region(made.transport.receiver(), max_kept_bytes=5000) as here:
        made.wait(1)
        send(made)
        serving = here.add(replica)
        arrived(serving, 1)
        for number, share in enumerate([0.01, 0.5, 0.01]):
            arrived(serving, sent(made, share, seed=number))
            assert bits_equal(source, replica)
        assert sum(stats.full_synced for stats in here.sent) == 2


def test_a_sleeping_receiver_below_misses_versions_and_gets_them_folded() -> None:
    source, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with fleet(source) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        send(made)
        serving = here.add(replica)
        arrived(serving, 1)
        serving.receiver.detach()
        for number in range(3):
            version = sent(made, seed=number)
            until(lambda: here.relay.version == made.sender.version)
        assert serving.receiver.version == 1
        serving.receiver.attach()
        arrived(serving, version)
        assert bits_equal(source, replica)
        assert sum(stats.full_synced for stats in here.sent) == 1
        assert here.sent[-1].base_version == 1


def test_sharded_engines_below_a_relay() -> None:
    source = random_model({"a": (30, 4), "b": (50,)}, 0)
    with fleet(source) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        send(made)
        ranks = [random_model({"a": (30, 4)}, 1), random_model({"b": (50,)}, 1)]
        servings = [here.add(one, rank=n, world=2) for n, one in enumerate(ranks)]
        for serving in servings:
            arrived(serving, 1)
        for number in range(3):
            version = sent(made, seed=number)
            for serving, rank in zip(servings, ranks, strict=True):
                arrived(serving, version)
                for name, parameter in rank.named_parameters():
                    assert torch.equal(parameter, source.get_parameter(name))


def test_a_receiver_in_another_dtype_is_refused_by_the_relay() -> None:
    source = random_model({"a": (30, 4)}, 0)
    with fleet(source) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        send(made)
        serving = here.add(random_model({"a": (30, 4)}, 1).bfloat16())
        until(lambda: bool(serving.errors))
        assert "the trainer sends" in str(serving.errors[0])


def test_wire_dtypes_below_a_relay() -> None:
    source = random_model({"a": (30, 4)}, 0)
    options = SenderOptions(wire_dtypes={"*": "bfloat16"})
    with fleet(source, options=options) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        send(made)
        replica = random_model({"a": (30, 4)}, 1).bfloat16()
        serving = here.add(replica)
        arrived(serving, 1)
        arrived(serving, sent(made))
        assert torch.equal(replica.get_parameter("a"), source.get_parameter("a").bfloat16())


def test_a_version_without_changes_is_forwarded() -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as made, region(made.transport.receiver()) as here:
        made.wait(1)
        send(made)
        serving = here.add(random_model(SHAPES, 1))
        arrived(serving, 1)
        arrived(serving, send(made))
        assert (here.sent[-1].nnz, here.sent[-1].num_buckets) == (0, 0)


@pytest.mark.parametrize("bucket_bytes", [400, None])
def test_a_trainer_of_several_ranks_above_a_relay(bucket_bytes: int | None) -> None:
    """Each rank sends its columns: the spans of their rows meet, and are merged for one link."""
    shapes = {"a": (40, 12), "b": (30, 4)}
    source, replica = random_model(shapes, 0), random_model(shapes, 1)
    boxes = [
        {
            name: ShardSpec((rows, cols), (0, rank * cols // 2), (rows, cols // 2))
            for name, (rows, cols) in shapes.items()
        }
        for rank in range(2)
    ]
    options = SenderOptions(bucket_bytes=bucket_bytes)
    with trainer_of(source, boxes, options=options) as made:
        first, second = (link.receiver() for link in made.links)
        with region(first, second, bucket_bytes=bucket_bytes) as here:
            made.wait(1)
            made.send()
            serving = here.add(replica)
            arrived(serving, 1)
            for number, share in enumerate([0.02, 0.4, 0.9]):
                step(source, torch.Generator().manual_seed(number), share)
                made.step()
                arrived(serving, made.send().version)
                assert bits_equal(source, replica)
            assert [stats.kind for stats in here.sent[-3:]] == ["delta"] * 3


def test_a_relay_with_a_file_joins_by_digest_when_it_is_restarted(tmp_path: Path) -> None:
    source, memory = random_model(SHAPES, 0), tmp_path / "model"
    with fleet(source) as made:
        with region(made.transport.receiver(), memory=memory) as here:
            made.wait(1)
            send(made)
            sent(made)
            until(lambda: here.relay.version == 2)
        with region(made.transport.receiver(), memory=memory) as here:
            made.wait(1)
            stats = made.sender.send_weights(timeout_s=10)
            assert (stats.joined, stats.full_synced) == (1, 0)
            until(lambda: here.relay.version == made.sender.version)
            replica = random_model(SHAPES, 1)
            arrived(here.add(replica), made.sender.version)
            assert bits_equal(source, replica)


def test_a_file_that_holds_something_else_is_overwritten(tmp_path: Path) -> None:
    source, memory = random_model({"a": (1000,)}, 0), tmp_path / "model"
    memory.write_bytes(bytes(4032))
    with fleet(source) as made, region(made.transport.receiver(), memory=memory) as here:
        made.wait(1)
        assert made.sender.send_weights(timeout_s=10).full_synced == 1
        until(lambda: here.relay.version == 1)
        assert memory.stat().st_size == 4032
        assert torch.equal(here.relay._target.tensors["a"], source.get_parameter("a"))


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    source, memory = random_model({"a": (1000,)}, 0), tmp_path / "none" / "model"
    with fleet(source) as made, region(made.transport.receiver(), memory=memory) as here:
        made.wait(1)
        with pytest.raises(SyncAborted, match="No such file"):
            made.sender.send_weights(timeout_s=10)
        until(lambda: "the copy takes" in str(here.relay.last_error))


def test_a_file_that_another_relay_uses_is_refused(tmp_path: Path) -> None:
    source, memory = random_model(SHAPES, 0), tmp_path / "model"
    with fleet(source) as made, region(made.transport.receiver(), memory=memory) as first:
        made.wait(1)
        send(made)
        with region(made.transport.receiver(), memory=memory) as second:
            made.wait(2)
            stats = made.sender.send_weights(timeout_s=10)
            assert "another process, or relay, uses it" in str(stats.lost)
            until(lambda: "uses it" in str(second.relay.last_error))
        arrived(first.add(random_model(SHAPES, 1)), 2)


@pytest.mark.parametrize("kind", ["pipe", "of another user"])
def test_a_file_that_others_could_change_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    memory = tmp_path / "model"
    if kind == "pipe":
        os.mkfifo(memory)
    elif os.geteuid() == 0:
        memory.write_bytes(bytes(4032))
        os.chown(memory, 65534, 65534)
    else:
        pytest.skip("only root can give files away")
    spec = ParameterSpec(("a",), (1000,), BY_NAME["float32"])
    for _ in range(2):
        with pytest.raises(ConfigError, match="another user"):
            CopiedTarget(path=memory).bind([spec])
    assert memory.is_fifo() == (kind == "pipe")
    assert memory.exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"max_kept_bytes": -1}, "max_kept_bytes"),
        ({"name": "x" * 257}, "engine"),
        ({"name": "\udc80"}, "engine"),
    ],
)
def test_what_no_relay_can_use_is_refused_at_once(options: dict[str, Any], named: str) -> None:
    above, below = inprocess.Sender(), inprocess.Sender()
    with above, below, pytest.raises(ConfigError, match=named):
        Relay(above.receiver(), below, **options)


CODINGS = get_args(Coding)


@pytest.mark.parametrize("above", CODINGS)
@pytest.mark.parametrize("below", CODINGS)
def test_payloads_are_coded_apart_above_and_below_a_relay(above: Coding, below: Coding) -> None:
    source = random_model({"a": (3000, 7), "b": (11,)}, 0).bfloat16()
    replica = random_model({"a": (3000, 7), "b": (11,)}, 1).bfloat16()
    options = SenderOptions(compression=above)
    with (
        fleet(source, options=options) as made,
        region(made.transport.receiver(), compression=below) as here,
    ):
        made.wait(1)
        send(made)
        serving = here.add(replica)
        arrived(serving, 1)
        for number, share in enumerate([0.01, 0.3, 0.9]):
            arrived(serving, sent(made, share, seed=number))
            assert bits_equal(source, replica)
        assert [stats.kind for stats in here.sent[-3:]] == ["delta"] * 3
