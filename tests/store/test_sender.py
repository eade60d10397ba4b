"""What a StoreSender publishes is what the trainer had, version by version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, StoreReceiver
from deltasync.errors import (
    ConfigError,
    MacMismatch,
    ManifestInvalid,
    ObjectDamaged,
    RunUnknown,
    WriterConflict,
)
from deltasync.store import keys
from deltasync.store.anchors import PublishOptions
from deltasync.store.catalogue import Run
from deltasync.store.objects import Objects, StoreOptions
from deltasync.store.sender import StoreSender
from deltasync.sync.options import SenderOptions
from deltasync.sync.source.streamed import StreamedWeights
from tests.store.replay import assert_holds, checkpoint_of
from tests.worlds.stores import Place


class Model(nn.Module):
    """Odd ones out: tied, empty, of no dimension, of other dtypes, one larger than a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(40, 16, dtype=torch.bfloat16))
        self.head = self.embed
        self.large = nn.Parameter(torch.randn(1 << 19, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 4, dtype=torch.float16))
        self.register_buffer("codes", torch.arange(33, dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("fp8", torch.randn(17).to(torch.float8_e4m3fn))

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            at = torch.randint(0, self.large.numel(), (500,), generator=generator)
            self.large[at] += 0.25
            self.embed[number % 40] = torch.tensor([float("nan"), -0.0, 0.0, 1e30] * 4)
            self.scale.add_(1)
            self.get_buffer("codes")[number % 33] ^= 255


def weights_of(model: Model) -> dict[str, Tensor]:
    found = {name: t.detach().clone() for name, t in model.state_dict().items() if name != "head"}
    assert "embed" in found
    return found


def sender_of(model: nn.Module, place: Place, run: str | None = "run", **more: Any) -> StoreSender:
    return StoreSender(
        ModuleSource(model),
        place.url,
        options=SenderOptions(stream_id=run, compression="zstd"),
        store=place.options,
        publishing=PublishOptions(**more) if more else None,
    )


def run_of(place: Place, run: str | None = None) -> Run:
    return Run.open(place.url, run, place.options)


def test_every_version_is_what_the_trainer_had(place: Place, tmp_path: Path) -> None:
    model = Model()
    sender = sender_of(model, place, anchor_every=3, anchor_file_bytes=600_000)
    history = {}
    for number in range(1, 7):
        stats = sender.publish()
        assert stats.version == sender.version == number
        assert stats.kind == ("anchor" if number == 1 else "delta")
        assert (stats.anchor_bytes > 0) == (number in (1, 4))
        assert stats.postponed == ""
        history[number] = weights_of(model)
        model.step(number)
    run = run_of(place)
    newest = run.newest()
    assert newest is not None
    assert newest.version == 6
    for number, weights in history.items():
        assert_holds(run, number, weights, tmp_path / f"replay{number}")


def test_a_version_without_changes_is_a_version(place: Place, tmp_path: Path) -> None:
    model = Model()
    sender = sender_of(model, place)
    sender.publish()
    stats = sender.publish()
    assert (stats.version, stats.nnz, stats.density) == (2, 0, 0.0)
    assert run_of(place).require(2).manifest.changed == ()
    assert_holds(run_of(place), 2, weights_of(model), tmp_path)


def test_s07_manifests_list_what_changed(place: Place) -> None:
    model = Model()
    sender = sender_of(model, place)
    sender.publish()
    with torch.no_grad():
        model.scale.add_(1)
    stats = sender.publish()
    run = run_of(place)
    first, second = run.require(1).manifest, run.require(2).manifest
    layout = run.layout(second.layout_hash)
    (changed,) = second.changed
    assert layout[changed[0]].name == "scale"
    assert [number for number, _ in first.changed] == list(range(len(layout)))
    digests = dict(first.changed) | dict(second.changed)
    assert sum(int(one, 16) for one in digests.values()) % (1 << 64) == int(second.digest, 16)
    assert stats.digest == int(second.digest, 16)
    assert {name for spec in layout for name in spec.names} == set(model.state_dict())


def test_a_trainer_that_starts_again_goes_on(place: Place, tmp_path: Path) -> None:
    model = Model()
    sender = sender_of(model, place)
    sender.publish()
    model.step(1)
    sender.publish()
    again = sender_of(model, place)
    stats = again.publish()
    assert (stats.kind, stats.version, stats.delta_bytes) == ("unchanged", 2, 0)
    model.step(2)
    stats = again.publish()
    assert (stats.kind, stats.version, stats.base_version) == ("delta", 3, 2)
    assert_holds(run_of(place), 3, weights_of(model), tmp_path)


def test_a_trainer_with_other_weights_begins_with_an_anchor(place: Place, tmp_path: Path) -> None:
    model = Model()
    sender_of(model, place).publish()
    model.step(1)  # and is killed before it publishes
    stats = sender_of(model, place).publish()
    assert (stats.kind, stats.version) == ("anchor", 2)
    second = run_of(place).require(2).manifest
    assert second.parent is not None
    assert second.parent.version == 1
    assert_holds(run_of(place), 2, weights_of(model), tmp_path)


def test_s05_another_model_in_the_same_run_begins_with_an_anchor(
    place: Place, tmp_path: Path
) -> None:
    sender_of(Model(), place).publish()
    other = nn.Linear(3, 4)
    stats = sender_of(other, place).publish()
    assert (stats.kind, stats.version) == ("anchor", 2)
    assert_holds(run_of(place), 2, dict(other.state_dict()), tmp_path)


def test_s03_of_two_writers_the_second_is_told(place: Place, tmp_path: Path) -> None:
    model, other = Model(), Model()
    one = sender_of(model, place)
    one.publish()
    two = sender_of(model, place)
    two.publish()
    model.step(1)
    expected = weights_of(model)
    one.publish()
    before = sorted(facts.key for facts in run_of(place).objects.listed(""))
    model.step(2)
    with pytest.raises(WriterConflict, match="has published v2 of run 'run'"):
        two.publish()
    with pytest.raises(WriterConflict):
        two.publish()
    assert sorted(facts.key for facts in run_of(place).objects.listed("")) == before
    assert_holds(run_of(place), 2, expected, tmp_path)
    del other


def test_a_new_run_without_a_name(place: Place) -> None:
    one, two = sender_of(nn.Linear(2, 2), place, None), sender_of(nn.Linear(2, 2), place, None)
    one.publish()
    assert run_of(place).name == one.run
    two.publish()
    assert one.run != two.run
    with pytest.raises(RunUnknown, match=min(one.run, two.run)):
        run_of(place)
    assert run_of(place, two.run).name == two.run
    with pytest.raises(RunUnknown, match="no run 'none'"):
        run_of(place, "none")


def test_the_url_of_a_run_goes_on_with_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one = StoreSender(ModuleSource(model), tmp_path)
    one.publish()
    two = StoreSender(ModuleSource(model), one.url)
    assert two.run == one.run
    assert two.publish().kind == "unchanged"
    assert Run.open(one.url).name == one.run
    with pytest.raises(ConfigError, match="is the folder of run"):
        StoreSender(ModuleSource(model), one.url, options=SenderOptions(stream_id="other"))


@pytest.mark.parametrize("run", ["", "../up", ".hidden", "a/b", "a b", "x" * 129, "\u00fc"])
def test_names_of_runs_that_are_no_keys_are_refused(run: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        StoreSender(
            ModuleSource(nn.Linear(1, 1)), tmp_path, options=SenderOptions(stream_id=run or "-")
        )


def test_payloads_are_coded_unless_that_is_declined(tmp_path: Path) -> None:
    for run, options in (
        ("coded", SenderOptions(stream_id="coded")),
        ("none", SenderOptions(stream_id="none", compression="none")),
    ):
        model = nn.Linear(64, 64, dtype=torch.bfloat16)
        sender = StoreSender(ModuleSource(model), tmp_path, options=options)
        sender.publish()
        with torch.no_grad():
            model.weight.view(-1)[::20] *= 1.01
        codecs = sender.publish().codecs
        assert any(name.startswith("gap") for name in codecs) == (run == "coded"), codecs
        assert_holds_by_reader(tmp_path, run, model)


def assert_holds_by_reader(url: Path, run: str, model: nn.Linear) -> None:
    held = nn.Linear(64, 64, dtype=torch.bfloat16)
    with StoreReceiver(ModuleTarget(held), url, run=run) as receiver:
        assert receiver.fetch() == 2
    assert torch.equal(held.weight, model.weight)


def test_an_empty_store_has_no_runs(place: Place) -> None:
    Objects(place.url, place.options, make=True)
    with pytest.raises(RunUnknown, match="no run here"):
        run_of(place)


def test_s09_signed_manifests_need_the_key(place: Place) -> None:
    model = nn.Linear(2, 2)
    with_key = place.options.model_copy(update={"mac_key": _secret("key")})
    keyed = Place(place.url, with_key, place.folder)
    sender = sender_of(model, keyed, anchor_every=1)
    sender.publish()
    sender.publish()
    found = run_of(keyed).newest()
    assert found is not None
    assert len(run_of(keyed).ways(found)) == 2
    other = place.options.model_copy(update={"mac_key": _secret("other")})
    with pytest.raises(MacMismatch, match="not of this key"):
        Run.open(place.url, None, other).newest()
    assert run_of(place).newest() is not None, "who has no key may read"
    sender_of(model, place).publish()
    with torch.no_grad():
        model.weight += 1
    sender_of(model, place).publish()
    with pytest.raises(MacMismatch, match="is not signed"):
        run_of(keyed).newest()


def _secret(text: str) -> object:
    return StoreOptions.model_validate({"mac_key": text.encode()}).mac_key


def test_s01_s04_altered_manifests_are_refused(place: Place) -> None:
    sender = sender_of(nn.Linear(2, 2), place)
    sender.publish()
    sender.publish()
    objects = run_of(place).objects
    first, second = keys.manifest_key(1), keys.manifest_key(2)
    data = objects.get(second, max_bytes=1 << 20)
    assert data is not None
    for bad in (
        b"",
        b"{}",
        data[:-1],
        data + b"\n",
        data.replace(b'"format":1', b'"format":2'),
        data.replace(b'"run":"run"', b'"run":"other"'),
        data.replace(b'"nnz":0', b'"nnz":-1'),
        data.replace(b'"nnz":0', b'"nnz":true'),
        data.replace(b'"nnz":0', b'"nnz":0,"more":0'),
        data.replace(b"objects/", b"objects/../"),
        objects.get(first, max_bytes=1 << 20),
    ):
        assert bad is not None
        objects.put(second, bad)
        with pytest.raises(ManifestInvalid, match=second):
            run_of(place).newest()
    objects.put(second, data)
    assert run_of(place).newest() is not None
    other = objects.get(first, max_bytes=1 << 20)
    assert other is not None
    objects.put(first, other.replace(b'"nnz":6', b'"nnz":5'))
    with pytest.raises(ManifestInvalid, match="is not a child"):
        run_of(place).newest(at_least=1)


def test_altered_layouts_are_refused(place: Place) -> None:
    sender = sender_of(nn.Linear(2, 2), place)
    sender.publish()
    run = run_of(place)
    layout_hash = run.require(1).manifest.layout_hash
    for bad in (b"[]", None):
        run.objects.delete(keys.layout_key(layout_hash))
        if bad is not None:
            run.objects.put(keys.layout_key(layout_hash), bad)
        with pytest.raises(ObjectDamaged, match="layouts/"):
            run.layout(layout_hash)


def test_streamed_weights_are_published(place: Place, tmp_path: Path) -> None:
    model = Model()
    weights = StreamedWeights(SenderOptions(stream_id="run"))
    sender = StoreSender(weights, place.url, store=place.options)
    for number in range(3):
        weights.take(weights_of(model).items())
        assert sender.publish().version == number + 1
        expected = weights_of(model)
        model.step(number)
    assert_holds(run_of(place), 3, expected, tmp_path)


def test_other_dtypes_are_sent_as_asked(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    options = SenderOptions(wire_dtypes={"*": "bfloat16"}, stream_id="run")
    sender = StoreSender(ModuleSource(model), tmp_path / "s", options=options)
    sender.publish()
    with torch.no_grad():
        model.weight *= 1.01
    sender.publish()
    found = checkpoint_of(Run.open(tmp_path / "s"), 2, tmp_path / "r")
    assert torch.equal(found.tensor("weight"), model.weight.to(torch.bfloat16))


def test_training_goes_on_while_it_is_uploaded(place: Place, tmp_path: Path) -> None:
    model = Model()
    sender = sender_of(model, place)
    for number in range(3):
        expected = weights_of(model)
        sender.publish(on_source_read=lambda number=number: model.step(number))  # type: ignore[misc]
    assert_holds(run_of(place), 3, expected, tmp_path)


def test_one_call_at_a_time(tmp_path: Path) -> None:
    sender = StoreSender(ModuleSource(nn.Linear(2, 2)), tmp_path)

    def again() -> None:
        with pytest.raises(ConfigError, match="one thread"):
            sender.publish()

    sender.publish(on_source_read=again)


@pytest.mark.parametrize("coding", ["gap", "block", "class"])
def test_codecs_are_counted_in_manifests(tmp_path: Path, coding: Any) -> None:
    model = Model()
    sender = StoreSender(
        ModuleSource(model),
        tmp_path / "store",
        options=SenderOptions(stream_id="run", compression=coding),
    )
    for number in range(4):
        stats = sender.publish()
        model.step(number)
    run = Run.open(tmp_path / "store")
    way = run.require(4).manifest.way
    assert any(name.startswith(coding) for name in way.codecs), way.codecs
    assert dict(way.codecs) == stats.codecs
    assert sum(way.codecs.values()) < way.num_bytes


@pytest.mark.parametrize("coding", ["none", "gap", "class"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_deltas_are_coded_as_asked(tmp_path: Path, coding: Any, is_streamed: bool) -> None:
    model = nn.Linear(512, 512, dtype=torch.bfloat16)
    options = SenderOptions(stream_id="run", compression=coding)
    weights = StreamedWeights(options) if is_streamed else None
    sender = StoreSender(
        weights or ModuleSource(model), tmp_path / "store", options=None if weights else options
    )
    for number in range(3):
        if weights is not None:
            weights.take(model.state_dict().items())
        stats = sender.publish()
        with torch.no_grad():
            model.weight.view(torch.int16).view(-1)[number::40] += 1
    assert stats.compression == coding
    assert any(name.startswith(coding) for name in stats.codecs), stats.codecs
    held = nn.Linear(512, 512, dtype=torch.bfloat16)
    with StoreReceiver(ModuleTarget(held), sender.url) as receiver:
        assert receiver.fetch() == 3
    expected = model.weight.detach().clone()
    expected.view(torch.int16).view(-1)[2::40] -= 1
    assert torch.equal(held.weight, expected)
