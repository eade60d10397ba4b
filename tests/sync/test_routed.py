"""An engine whose parameters are not the checkpoint's holds what its own loader would load."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ReceiverOptions, SenderOptions, WeightTarget
from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import ConfigError, DigestMismatch, SyncAborted
from deltasync.testing.target import TargetContract
from tests.worlds.links import Model, bits_equal, fleet, random_model, step, until

EXPERTS = 3
SHAPES = (
    {"embed": (13, 4), "q": (8, 4), "k": (2, 4), "v": (2, 4), "o": (4, 8), "norm": (4,)}
    | {f"gate{n}": (3, 4) for n in range(EXPERTS)}
    | {f"up{n}": (3, 4) for n in range(EXPERTS)}
    | {f"down{n}": (4, 3) for n in range(EXPERTS)}
    | {"router": (EXPERTS, 4)}
)


class Engine(nn.Module):
    """q, k and v fused, experts stacked, rows padded, a projection transposed, a float32 router.

    Attributes:
        loaded: How many tensors with data were loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0
        for name, shape in {
            "embed": (16, 4),
            "qkv": (12, 4),
            "o": (8, 4),
            "norm": (4,),
            "w13": (EXPERTS, 6, 4),
            "w2": (EXPERTS, 4, 3),
        }.items():
            self._add(name, torch.zeros(shape, dtype=torch.bfloat16))
        self._add("router", torch.zeros(EXPERTS, 4))

    def _add(self, name: str, tensor: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded += not tensor.is_meta
            self._place(name.rstrip("0123456789"), name[-1], tensor.shape).copy_(
                tensor.T if name == "o" else tensor
            )
            if name == "embed":
                self.get_parameter("embed").data[len(tensor) :].zero_()

    def _place(self, kind: str, last: str, shape: torch.Size) -> Tensor:
        match kind:
            case "q" | "k" | "v":
                begin = {"q": 0, "k": 8, "v": 10}[kind]
                return self.get_parameter("qkv").data.narrow(0, begin, shape[0])
            case "gate" | "up":
                return self.get_parameter("w13").data[int(last)].chunk(2)[kind == "up"]
            case "down":
                return self.get_parameter("w2").data[int(last)]
            case "embed":
                return self.get_parameter("embed").data[: shape[0]]
            case _:
                return self.get_parameter(kind).data


class ShufflingEngine(Engine):
    """Keeps the halves of its experts the other way round once they are loaded."""

    def finish(self) -> None:
        w13 = self.get_parameter("w13").data
        w13.copy_(torch.cat(w13.chunk(2, dim=1)[::-1], dim=1))


CHECKPOINT = [CheckpointTensor(name, shape, torch.bfloat16) for name, shape in SHAPES.items()]


def trainer(seed: int) -> Model:
    return random_model(SHAPES, seed)


def engine_of(source: nn.Module, kind: type[Engine] = Engine) -> Engine:
    """What a fresh engine holds of the trainer's weights."""
    engine = kind()
    dtypes = {"router": torch.float32}
    engine.load_weights(
        (name, weights.data.to(dtypes.get(name, torch.bfloat16)))
        for name, weights in source.named_parameters()
    )
    engine.loaded = 0
    return engine


@pytest.mark.promise("Bits", "An engine holds what its own loader would load.")
@settings(max_examples=15, deadline=None)
@given(
    same=st.booleans(),
    bucket_bytes=st.sampled_from([300, 1 << 20]),
    staged_bytes=st.sampled_from([0, None]),
    shares=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), max_size=4),
    seed=st.integers(0, 99),
)
def test_any_history_leaves_what_the_loader_would_load(
    same: bool, bucket_bytes: int, staged_bytes: int | None, shares: list[float], seed: int
) -> None:
    source, generator = trainer(seed), torch.Generator().manual_seed(seed)
    engine = engine_of(source if same else trainer(seed + 1))
    with fleet(source, options=SenderOptions(bucket_bytes=bucket_bytes)) as here:
        options = ReceiverOptions(max_staged_bytes=staged_bytes, stall_timeout_s=5)
        here.add(RoutedTarget(engine, CHECKPOINT), options=options)
        here.wait(1)
        stats = here.sender.send_weights()
        assert (stats.full_synced, stats.receivers) == (0 if same else 1, 1)
        for share in shares:
            step(source, generator, share)
            stats = here.sender.send_weights()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 1, {})
        assert bits_equal(engine, engine_of(source))
    # A full sync goes through the loader once, each tensor whole; deltas never do.
    assert engine.loaded == (0 if same else len(SHAPES))


def test_a_full_sync_restores_what_no_route_leads_to() -> None:
    source, engine = trainer(0), engine_of(trainer(1))
    with fleet(source) as here:
        serving = here.add(RoutedTarget(engine, CHECKPOINT))
        here.wait(1)
        here.sender.send_weights()
        serving.receiver.invalidate()
        for parameter in engine.parameters():  # padding too
            parameter.data.fill_(torch.nan)
        full_synced = 0
        while not full_synced:  # it is first found to have left
            here.wait(1)
            with suppress(SyncAborted):
                full_synced = here.sender.send_weights().full_synced
        assert bits_equal(engine, engine_of(source))
    assert engine.loaded == 2 * len(SHAPES)


def test_what_is_derived_is_brought_up_to_date_by_every_sync() -> None:
    source, engine = trainer(0), engine_of(trainer(1))
    norms: list[float] = []

    def finish() -> None:
        norms.append(float(engine.get_parameter("norm").sum()))

    with fleet(source) as here:
        here.add(RoutedTarget(engine, CHECKPOINT, finish=finish))
        here.wait(1)
        for _ in range(3):
            here.sender.send_weights()
            assert norms[-1] == float(engine.get_parameter("norm").sum())
            source.get_parameter("norm").data += 1
    assert len(norms) == 3


def test_tied_names_reach_the_loader_as_it_knows_them() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Parameter(torch.zeros(4, 3))

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                if name == "tok":
                    self.tok.data.copy_(tensor)

    source, engine = Model({"head": torch.randn(4, 3)}), Tied()
    source.register_parameter("tok", source.get_parameter("head"))
    with fleet(source) as here:
        here.add(RoutedTarget(engine, [CheckpointTensor("tok", (4, 3), torch.float32)]))
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        assert torch.equal(engine.tok, source.get_parameter("tok"))


def test_a_layout_that_changes_after_loading_is_found_before_a_delta() -> None:
    source, engine = trainer(0), engine_of(trainer(1), ShufflingEngine)
    assert isinstance(engine, ShufflingEngine)
    target = RoutedTarget(engine, CHECKPOINT, finish=engine.finish)
    with fleet(source) as here:
        serving = here.add(target)
        here.wait(1)
        with pytest.raises(SyncAborted, match=r"gate0.* the engine changes its layout"):
            here.sender.send_weights()
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[0], DigestMismatch)
        assert serving.receiver.is_dirty


def test_an_engine_that_moves_its_weights_when_it_finishes_is_told() -> None:
    source, engine = trainer(0), engine_of(trainer(1))

    def finish() -> None:
        engine.get_parameter("o").data = engine.get_parameter("o").data.clone()

    with fleet(source) as here:
        here.add(RoutedTarget(engine, CHECKPOINT, finish=finish))
        here.wait(1)
        with pytest.raises(SyncAborted, match="storage of the engine was replaced"):
            here.sender.send_weights()


def test_what_the_engine_was_started_on_is_read_back() -> None:
    source = trainer(0)
    weights = [(name, w.data) for name, w in source.named_parameters()]
    target = RoutedTarget(engine_of(source), CHECKPOINT)
    target.verify_routes(weights)
    with pytest.raises(
        ConfigError, match="has no 'down0': start the engine on a checkpoint that has it"
    ):
        target.verify_routes([(name, tensor) for name, tensor in weights if name != "down0"])
    shuffled = engine_of(source, ShufflingEngine)
    assert isinstance(shuffled, ShufflingEngine)
    shuffled.finish()
    with pytest.raises(ConfigError, match=r"6 tensors have no route: 'gate0', .* are not where"):
        RoutedTarget(shuffled, CHECKPOINT).verify_routes(weights)


class Computing(Engine):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((n, t + 1 if n == "norm" else t) for n, t in weights)


class Replacing(Engine):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm = nn.Parameter(tensor, requires_grad=False)
            else:
                super().load_weights([(name, tensor)])


class Lazy(Engine):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        yield from weights


class Overlapping(Engine):
    def __init__(self) -> None:
        super().__init__()
        self._add("part", self.get_parameter("w2").data[0])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "down0":
                self.get_parameter("part").data.copy_(tensor)


class Interleaving(Engine):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                live = self.get_parameter("qkv").data
                live[:4], live[4:8] = tensor[4:], tensor[:4]
            else:
                super().load_weights([(name, tensor)])


@pytest.mark.parametrize(
    ("engine", "checkpoint", "why"),
    [
        (Computing, CHECKPOINT, r"2 tensors have no route: 'norm' is not only copied: aten.add"),
        (Interleaving, CHECKPOINT, None),  # q is kept in two parts
        (Engine, CHECKPOINT[:-1], None),  # the router is left as it is
        (Replacing, CHECKPOINT, "the loader replaces 'norm', where it should fill"),
        (Lazy, CHECKPOINT, "'down0' is not asked for"),
        (Overlapping, CHECKPOINT, "'part'|'w2'"),
        (Engine, [c for c in CHECKPOINT if c.name != "k"], "'qkv': the loader does not copy"),
    ],
)
def test_what_has_no_route_is_refused_by_name(
    engine: type[Engine], checkpoint: list[CheckpointTensor], why: str | None
) -> None:
    made = engine()
    before = dict(made.named_parameters())
    target = RoutedTarget(made, checkpoint)
    if why is None:
        assert len(target.parameters()) == len(checkpoint)
    else:
        with pytest.raises(ConfigError, match=why) as raised:
            target.parameters()
        assert "EngineSync(without_routes='reload')" in str(raised.value)
        assert "\n" not in str(raised.value)
    after = dict(made.named_parameters())
    assert all(before[name] is after[name] and not after[name].any() for name in before)


class Loaded(nn.Module):
    """The contract's model: a padded embedding, a transposed projection."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in {
            "embed": torch.zeros(16, 4, dtype=torch.bfloat16),
            "norm": torch.zeros(4),
            "proj": torch.zeros(8, 4, dtype=torch.bfloat16),
            "scale": torch.zeros(()),
        }.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            live = self.get_parameter(own_name(name)).data
            if "embed" in name:
                live[len(tensor) :].zero_()
                live = live[: len(tensor)]
            live.copy_(tensor.T if "proj" in name else tensor)


def own_name(name: str) -> str:
    return next(own for own in ("embed", "norm", "proj", "scale") if own in name)


class TestRoutedTarget(TargetContract):
    engine: Loaded

    def make_target(self, state: dict[str, Tensor]) -> WeightTarget:
        self.engine = Loaded()
        self.engine.load_weights(state.items())
        checkpoint = [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in state.items()]
        return RoutedTarget(self.engine, checkpoint)

    def replace_storage(self, name: str) -> None:
        parameter = self.engine.get_parameter(own_name(name))
        parameter.data = parameter.data.clone()
