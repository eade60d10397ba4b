"""What a receiver proved to hold, as a checkpoint: bit for bit, or refused."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor

from deltasync import ReceiverOptions, RoutedTarget, WeightReceiver
from deltasync.delta.bits import _TORCH, as_bits
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    DigestMismatch,
    DirtyReceiver,
    LayoutMismatch,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.export import export_weights
from deltasync.sync.source.layout import source_specs
from deltasync.sync.source.tensors import NamedTensor
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import inprocess
from tests.worlds.links import Fleet, Model, fleet, random_model, step, until
from tests.worlds.toy_engines import CHECKPOINT, Wide, trainer


def every_dtype() -> dict[str, Tensor]:
    """Random bits of each dtype, in odd shapes."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, dtype in _TORCH.items():
        size = torch.empty(0, dtype=dtype).element_size()
        data = torch.randint(0, 256, (15 * size,), dtype=torch.uint8, generator=generator)
        data = data % 2 if dtype is torch.bool else data
        tensors[f"{name}_"] = data.view(dtype).view(3, 5)
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(-0.0)
    tensors["nan"] = torch.tensor([0x7F81, 0x7FC1 - 0x8000], dtype=torch.int16).view(torch.bfloat16)
    return tensors


def assert_exported(path: Path, expected: dict[str, Tensor]) -> None:
    found = Checkpoint(path)
    assert found.specs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found.specs[name].shape == tuple(tensor.shape)
        there = as_bits(found.tensor(name).view(-1))
        assert torch.equal(there, as_bits(tensor.detach().contiguous().view(-1))), name


def copied(made: Fleet, **options: Any) -> tuple[WeightReceiver, CopiedTarget]:
    target = CopiedTarget()
    serving = made.add(target, **options)
    made.wait(1)
    made.sender.send_weights(timeout_s=5)
    until(lambda: serving.receiver.version == made.sender.version)
    return serving.receiver, target


@pytest.mark.parametrize("shard_bytes", [1, 100, 1 << 30])
def test_every_dtype_is_exported_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    tensors = every_dtype()
    with fleet(Model(tensors)) as made:
        receiver, _ = copied(made)
        done = export_weights(receiver, tmp_path / "model", shard_bytes=shard_bytes)
        assert (done.version, done.stream_id) == (1, made.sender.stream_id)
        assert_exported(tmp_path / "model", tensors)
        assert all(file.is_file() for file in done.files)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tied_tensor_is_written_once_and_its_file_names_the_others(tmp_path: Path) -> None:
    source = random_model({"embed": (6, 4), "head": (6, 4), "norm": (4,)}, seed=1)
    source.head = source.embed
    with fleet(source) as made:
        receiver, _ = copied(made)
        export_weights(receiver, tmp_path / "model")
    restored = random_model({"embed": (6, 4), "head": (6, 4), "norm": (4,)}, seed=2)
    restored.head = restored.embed
    missing, unexpected = load_model(restored, tmp_path / "model" / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(*(one.get_parameter("embed") for one in (restored, source)))
    assert torch.equal(*(one.get_parameter("norm") for one in (restored, source)))


def test_later_versions_are_exported_while_the_receiver_is_in_use(tmp_path: Path) -> None:
    source, generator = random_model({"a": (300, 7), "b": (11,)}, seed=3), torch.Generator()
    with fleet(source) as made:
        receiver, _ = copied(made)
        for number in range(3):
            step(source, generator.manual_seed(number), 0.1)
            made.sender.send_weights(timeout_s=5)
            until(lambda: receiver.version == made.sender.version)
            done = export_weights(receiver, tmp_path / str(number))
            assert done.version == made.sender.version
            assert_exported(tmp_path / str(number), dict(source.named_parameters()))


def test_weights_are_rescued_when_the_sender_is_gone(tmp_path: Path) -> None:
    source = random_model({"a": (300, 7)}, seed=3)
    with fleet(source) as made:
        receiver, _ = copied(made)
        made.sender.close()
        until(lambda: receiver.state.name == "OUTSIDE")
        export_weights(receiver, tmp_path / "model")
        assert_exported(tmp_path / "model", dict(source.named_parameters()))


def test_nothing_is_exported_before_a_version_is_held(tmp_path: Path) -> None:
    link = inprocess.Sender()
    receiver = WeightReceiver(CopiedTarget(), link.receiver())
    with receiver, pytest.raises(CallOrderError, match="holds no version"):
        export_weights(receiver, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_weights_bound_for_a_version_that_did_not_come_are_not_exported(tmp_path: Path) -> None:
    """A copy that meets another layout has other memory, and nothing in it yet."""
    with fleet(random_model({"a": (300,)}, seed=0)) as made:
        receiver, _ = copied(made)
        made.sender.close()
        until(lambda: receiver.state.name == "OUTSIDE")
        with receiver._lock:
            other = random_model({"a": (200,)}, seed=0)
            specs = source_specs([NamedTensor(("a",), other.get_parameter("a"))])
            receiver._weights.bind(specs, lanes=1, is_alone=True)
        with pytest.raises(CallOrderError, match="between two versions"):
            export_weights(receiver, tmp_path / "model")


def test_dirty_weights_are_not_exported(tmp_path: Path) -> None:
    with fleet(random_model({"a": (300,)}, seed=0)) as made:
        receiver, _ = copied(made)
        with receiver._lock:
            receiver._session.dirty = True
            with pytest.raises(DirtyReceiver):
                export_weights(receiver, tmp_path / "model")
            receiver._session.dirty = False


def test_detached_weights_are_not_exported(tmp_path: Path) -> None:
    with fleet(random_model({"a": (300,)}, seed=0)) as made:
        receiver, _ = copied(made)
        receiver.detach()
        with pytest.raises(CallOrderError, match="detached"):
            export_weights(receiver, tmp_path / "model")


def test_weights_that_something_else_wrote_are_refused(tmp_path: Path) -> None:
    with fleet(random_model({"a": (300,)}, seed=0)) as made:
        # Not scrubbed after the sync, which could see it first.
        receiver, target = copied(made, options=ReceiverOptions(scrub_every=0))
        target.tensors["a"][7] += 1
        with pytest.raises(DigestMismatch, match="something else wrote"):
            export_weights(receiver, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_engine_that_lacks_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    source = random_model({"a": (30,), "b": (5,)}, seed=0)
    with fleet(source) as made:
        receivers = [
            made.add(random_model({name: shape}, seed=1), rank=rank, world=2).receiver
            for rank, (name, shape) in enumerate([("a", (30,)), ("b", (5,))])
        ]
        made.wait(2)
        made.sender.send_weights(timeout_s=5)
        until(lambda: receivers[0].version == 1)
        with pytest.raises(LayoutMismatch, match="does not hold 'b'"):
            export_weights(receivers[0], tmp_path / "model")


def test_an_existing_folder_stays_as_it_is(tmp_path: Path) -> None:
    with fleet(random_model({"a": (300,)}, seed=0)) as made:
        receiver, _ = copied(made)
        with pytest.raises(ConfigError, match="exists"):
            export_weights(receiver, tmp_path)


def test_a_name_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    with fleet(random_model({"__metadata__": (300,)}, seed=0)) as made:
        receiver, _ = copied(made)
        with pytest.raises(ConfigError, match="__metadata__"):
            export_weights(receiver, tmp_path / "model")


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    with fleet(random_model({"a": (300_000,)}, seed=0)) as made:
        receiver, _ = copied(made)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with pytest.raises(ConfigError, match="File too large"):
                export_weights(receiver, tmp_path / "model")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert not list(tmp_path.iterdir())
        export_weights(receiver, tmp_path / "model")


def test_a_fused_engine_is_exported_in_the_checkpoint_s_form(tmp_path: Path) -> None:
    engine, source = Wide(0, 1), trainer(3)
    with fleet(source) as made:
        serving = made.add(RoutedTarget(engine, CHECKPOINT))
        made.wait(1)
        made.sender.send_weights(timeout_s=5)
        until(lambda: serving.receiver.version == 1)
        export_weights(serving.receiver, tmp_path / "model")
        sent = {name: weights.to(torch.bfloat16) for name, weights in source.named_parameters()}
        sent |= {name: source.get_parameter(name).data for name in Wide.dtypes}
        assert_exported(tmp_path / "model", sent)
