"""What a receiver proved to hold, as a checkpoint: bit for bit, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ReceiverOptions,
    RoutedTarget,
    StoreSender,
    WeightReceiver,
    export_weights,
)
from deltasync.delta.bits import torch_dtype
from deltasync.dtypes import DTYPES
from deltasync.errors import (
    CallOrderError,
    DeltaSyncError,
    DigestMismatch,
    DirtyReceiver,
    LayoutMismatch,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.store.checkpoints import fetch_checkpoint
from deltasync.store.copied import CopiedTarget
from deltasync.sync.source.layout import source_specs
from deltasync.sync.source.tensors import NamedTensor
from deltasync.transports import inprocess
from tests.files.saved import holds
from tests.worlds.links import Fleet, Model, fleet, random_model, until
from tests.worlds.toy_engines import CHECKPOINT, Wide, trainer


def every_dtype() -> dict[str, Tensor]:
    """Random bits of each dtype, in odd shapes."""
    tensors: dict[str, Tensor] = {}
    for dtype in DTYPES:
        data = torch.randint(0, 256, (15 * dtype.item_size,), dtype=torch.uint8)
        data = data % 2 if dtype.name == "bool" else data
        tensors[f"{dtype.name}_"] = data.view(torch_dtype(dtype)).view(3, 5)
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(-0.0)
    tensors["nan"] = torch.tensor([0x7F81, 0x7FC1 - 0x8000], dtype=torch.int16).view(torch.bfloat16)
    return tensors


def received(made: Fleet, target: nn.Module | CopiedTarget | RoutedTarget) -> WeightReceiver:
    """Of a target, which holds the sender's first version."""
    # Not scrubbed after the sync, which could see first what something else wrote.
    serving = made.add(target, options=ReceiverOptions(scrub_every=0))
    made.wait(1)
    made.sender.send_weights(timeout_s=60)
    until(lambda: serving.receiver.version == made.sender.version)
    return serving.receiver


@pytest.mark.parametrize("shard_bytes", [100, 1 << 30])
def test_every_dtype_is_exported_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    tensors = every_dtype()
    with fleet(Model(tensors)) as made:
        receiver = received(made, CopiedTarget())
        done = export_weights(receiver, tmp_path / "model", shard_bytes=shard_bytes)
        assert (done.version, done.stream_id) == (1, made.sender.stream_id)
        assert holds(tmp_path / "model", tensors)
        for file in done.files:
            specs = Checkpoint(file).specs.values()
            num_bytes = sum(spec.numel * spec.dtype.item_size for spec in specs)
            assert num_bytes <= shard_bytes or len(specs) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_fused_engine_is_exported_in_the_checkpoint_s_form(tmp_path: Path) -> None:
    engine, source = Wide(0, 1), trainer(3)
    with fleet(source) as made:
        export_weights(received(made, RoutedTarget(engine, CHECKPOINT)), tmp_path / "model")
        sent = {name: weights.to(torch.bfloat16) for name, weights in source.named_parameters()}
        sent |= {name: source.get_parameter(name).data for name in Wide.dtypes}
        assert holds(tmp_path / "model", sent)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(4)


def test_what_exporters_write_is_loaded_with_ties(tmp_path: Path) -> None:
    """A tied tensor is written once, and its file names the others."""
    source = Tied()
    StoreSender(ModuleSource(source), tmp_path / "store").publish()
    fetch_checkpoint(tmp_path / "store", tmp_path / "fetched")
    with fleet(source) as made:
        export_weights(received(made, Tied()), tmp_path / "exported")
    paths = [tmp_path / name / "model.safetensors" for name in ("fetched", "exported")]
    for path in paths:
        restored = Tied()
        assert not any(load_model(restored, path))
        for name, tensor in source.state_dict().items():
            assert torch.equal(restored.state_dict()[name], tensor)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert paths[0].read_bytes() == paths[1].read_bytes()


# What is not exported


def bind_for_another_layout(receiver: WeightReceiver, target: CopiedTarget) -> None:
    """A copy that meets another layout has other memory, and nothing in it yet."""
    with receiver._lock:
        other = random_model({"a": (200,)}, seed=0)
        specs = source_specs([NamedTensor(("a",), other.get_parameter("a"))])
        receiver._weights.bind(specs, lanes=1, world=1)


def write(receiver: WeightReceiver, target: CopiedTarget) -> None:
    target.tensors["a"][7] += 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (bind_for_another_layout, CallOrderError, "between two versions"),
        (lambda receiver, target: receiver.detach(), CallOrderError, "detached"),
        (write, DigestMismatch, "something else wrote"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    tmp_path: Path,
    change: Callable[[WeightReceiver, CopiedTarget], None],
    error: type[DeltaSyncError],
    text: str,
) -> None:
    target = CopiedTarget()
    with fleet(random_model({"a": (300_000,)}, seed=0)) as made:
        receiver = received(made, target)
        made.sender.close()
        until(lambda: receiver.state.name == "OUTSIDE")
        change(receiver, target)
        with pytest.raises(error, match=text):
            export_weights(receiver, tmp_path / "model")
        assert not list(tmp_path.iterdir())


def test_where_two_versions_may_be_mixed_nothing_is_exported(tmp_path: Path) -> None:
    link = inprocess.Sender()
    with (
        WeightReceiver(CopiedTarget(), link.receiver(), half_written=True) as receiver,
        pytest.raises(DirtyReceiver),
    ):
        export_weights(receiver, tmp_path / "model")


def test_an_engine_that_lacks_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    shapes = {"a": (30,), "b": (5,)}
    with fleet(random_model(shapes, seed=0)) as made:
        receivers = [
            made.add(random_model({name: shape}, seed=1), rank=rank, world=2).receiver
            for rank, (name, shape) in enumerate(shapes.items())
        ]
        made.wait(2)
        made.sender.send_weights(timeout_s=60)
        until(lambda: receivers[0].version == 1)
        with pytest.raises(LayoutMismatch, match="does not hold 'b'"):
            export_weights(receivers[0], tmp_path / "model")
