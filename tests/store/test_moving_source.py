"""A source that is written while it is published: no version that readers cannot read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreReceiver, StoreSender
from deltasync.delta.backend import Delta
from deltasync.errors import SyncAborted
from deltasync.store.anchors import PublishOptions
from deltasync.store.manifest import Way
from deltasync.store.verifying import verify_run
from deltasync.sync.source.streamed import StreamedWeights
from tests.worlds.strategies import same_bits

OPTIONS = SenderOptions(stream_id="run", max_inflight_bytes=1000)


class Raced(StoreSender):
    """Something writes the source after it was compared, and before it is packed.

    Attributes:
        write: What it does.
    """

    write: Callable[[], object] = staticmethod(lambda: None)

    def _write_delta(self, delta: Delta) -> Way:
        self.write()
        return super()._write_delta(delta)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100), nn.Linear(100, 100))


def raced(model: nn.Module, folder: Path, options: SenderOptions = OPTIONS) -> Raced:
    publishing = PublishOptions(anchor_every=3)
    return Raced(ModuleSource(model), folder, options=options, publishing=publishing)


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def add(tensor: Tensor, *places: tuple[int, ...]) -> None:
    with torch.no_grad():
        for place in places:
            tensor[place].add_(1)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_read(folder: Path, version: int, state: dict[str, Tensor]) -> None:
    """A new reader gets these weights."""
    engine = net(7)
    with StoreReceiver(ModuleTarget(engine), folder) as receiver:
        assert receiver.fetch(timeout_s=30) == version
    found = engine.state_dict()
    assert all(same_bits(found[name], tensor) for name, tensor in state.items())


def assert_proved(folder: Path, versions: int) -> None:
    found = verify_run(folder)
    assert (found.faults, found.proved) == ([], list(range(1, versions + 1)))


@pytest.mark.parametrize("writes", [1, 2])
@pytest.mark.parametrize("name", ["0.weight", "2.weight", "0.bias", "1.running_mean"])
def test_a_version_that_something_wrote_into_is_not_published(
    tmp_path: Path, name: str, writes: int
) -> None:
    model, published = net(), 0
    sender = raced(model, tmp_path)
    for turn in range(8):
        step(model)
        model(torch.randn(9, 100))  # which moves the statistics
        if turn in (2, 3, 5):
            tensor = model.state_dict()[name]
            sender.write = partial(add, tensor, *((n,) * tensor.dim() for n in range(writes)))
            with pytest.raises(SyncAborted, match=rf"was not published.*{name}"):
                sender.publish()
            sender.write = lambda: None
            if turn == 3:  # the trainer is started again
                sender = raced(model, tmp_path)
            continue
        published += 1
        assert sender.publish().version == published
        assert_read(tmp_path, published, state_of(model))
    assert_proved(tmp_path, published)


def test_a_write_that_is_gone_again_is_no_other_version(tmp_path: Path) -> None:
    """What was compared differs from what is packed, though the version before equals that."""
    model = net()
    sender = raced(model, tmp_path)
    sender.publish()
    before = state_of(model)
    step(model)
    sender.write = lambda: model.load_state_dict(before)
    with pytest.raises(SyncAborted, match="source changed"):
        sender.publish()
    sender.write = lambda: None
    sender.publish()
    assert_read(tmp_path, 2, before)
    assert_proved(tmp_path, 2)


def test_a_write_into_what_is_held_already_is_of_the_next_version(tmp_path: Path) -> None:
    model = net()
    sender = raced(model, tmp_path)
    sender.publish()
    add(model[0].get_parameter("weight"), (3, 4))
    compared = state_of(model)
    sender.write = lambda: add(model[2].get_parameter("weight"), (5, 6))
    sender.publish()
    assert_read(tmp_path, 2, compared)
    sender.write = lambda: None
    sender.publish()
    assert_read(tmp_path, 3, state_of(model))
    assert_proved(tmp_path, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("inflight", [None, 0])
def test_kernels_digest_what_they_pack_so_that_a_late_write_is_of_one_of_two_versions(
    tmp_path: Path, inflight: int | None
) -> None:
    """They read each element that is packed once, and a reader gets what the digest says."""
    model = net()
    options = SenderOptions(stream_id="run", kernels="triton", max_inflight_bytes=inflight)
    sender = raced(model, tmp_path, options)
    generator = torch.Generator().manual_seed(1)

    def write() -> None:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor[torch.rand(tensor.shape, generator=generator) < 0.1] += 1

    for version, is_dense in enumerate([True, True, False, False, True], 1):
        if is_dense:  # all of it is sent without indices
            step(model)
        else:
            for tensor in model.parameters():
                add(tensor, *((n,) * tensor.dim() for n in range(version)))
        sender.write = write if version in (2, 3) else lambda: None
        assert sender.publish().version == version
        if version > 3:
            assert_read(tmp_path, version, dict(model.named_parameters()))
    assert_proved(tmp_path, 5)


def test_a_write_during_the_upload_is_of_the_next_version(tmp_path: Path) -> None:
    model = net()
    sender = raced(model, tmp_path)
    for version in range(1, 6):
        step(model)
        published = state_of(model)
        sender.publish(on_source_read=lambda: step(model))
        assert_read(tmp_path, version, published)
    assert_proved(tmp_path, 5)


def test_an_anchor_that_is_not_the_version_is_none_and_the_next_one_heals(tmp_path: Path) -> None:
    """A bit of the copy that the trainer keeps flips in its memory."""
    model, weights = net(), StreamedWeights(OPTIONS)
    sender = StoreSender(weights, tmp_path, publishing=PublishOptions(anchor_every=4))
    stats = []
    for turn in range(9):
        weights.take(model.state_dict().items())
        stats.append(sender.publish())
        if turn == 0:
            weights.snapshot.flats[0].line[:1].bitwise_not_()
        add(model[2].get_parameter("weight"), (1, 1))
    [damaged] = [one.version for one in stats if "memory was altered" in one.postponed]
    assert (stats[damaged].kind, stats[damaged].postponed) == ("anchor", "")
    add(model[2].get_parameter("weight"), (1, 1))
    weights.take(model.state_dict().items())
    assert_read(tmp_path, sender.publish().version, state_of(model))
    assert verify_run(tmp_path).proved[-1] == 10
