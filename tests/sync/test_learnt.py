"""Engines that replace what they have loaded are written where they keep it, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync.delta.bits import as_bits
from deltasync.engines.learnt import LearntTarget
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.learnt import learn_routes
from deltasync.engines.proof.proving import Proof
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import ConfigError, TargetMoved
from tests.engines.checkpoints import Weights
from tests.worlds.links import fleet

FP8 = torch.float8_e4m3fn


class Matrix(nn.Module):
    """Two fused quantized matrices, and the scales of their blocks of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 8, dtype=FP8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(4, 2), requires_grad=False)

    def load(self, which: str, part: int, tensor: Tensor) -> None:
        rows = self.get_parameter(which).data.chunk(2)[part]
        rows.copy_(tensor)

    def work(self) -> None:
        """What the engine does once weights are there: not twice."""
        assert self.weight.shape == (16, 8)
        bits = as_bits(self.weight.data)
        tiled = bits.view(2, 8, 2, 4).permute(2, 0, 3, 1).contiguous()
        self.weight = nn.Parameter(tiled.view(torch.int32), requires_grad=False)
        wide = torch.zeros(8, 2)
        wide[:4] = self.scale.data
        self.scale = nn.Parameter(wide.t().contiguous().t(), requires_grad=False)


class Engine(nn.Module):
    made: type[Matrix] = Matrix

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.made() for _ in range(3)])
        self.norm = nn.Parameter(torch.empty(8, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            _, layer, part, which = name.split(".")
            matrix = self.layers[int(layer)]
            assert isinstance(matrix, Matrix)
            matrix.load(which, int(part), tensor)

    @classmethod
    def started(cls, weights: dict[str, Tensor]) -> Engine:
        engine = cls()
        engine.load_weights(weights.items())
        work_on(list(engine.modules()))
        return engine


def work_on(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, Matrix):
            module.work()


def checkpoint(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {"norm": torch.randn(8, generator=generator).bfloat16()}
    for layer in range(3):
        for part in range(2):
            bits = torch.randint(0, 256, (8, 8), generator=generator, dtype=torch.uint8)
            found[f"layers.{layer}.{part}.weight"] = bits.view(FP8)
            found[f"layers.{layer}.{part}.scale"] = torch.rand(2, 2, generator=generator)
    return found


def target_of(engine: Engine, weights: dict[str, Tensor]) -> LearntTarget:
    tensors = [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    return LearntTarget(engine, tensors, learn_routes(proof_of(engine), tensors))


def proof_of(engine: Engine) -> Proof:
    return Proof(engine, Startup(type(engine), work_on=work_on))


def bits_of(engine: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {n: (p.data_ptr(), as_bits(p.data).clone()) for n, p in engine.named_parameters()}


@settings(max_examples=8)
@given(st.integers(0, 1 << 20))
def test_any_history_leaves_what_the_engine_would_make(seed: int) -> None:
    first = checkpoint(seed)
    engine = Engine.started(first)
    before = bits_of(engine)
    target = target_of(engine, first)
    assert {name: one[0] for name, one in bits_of(engine).items()} == {
        name: one[0] for name, one in before.items()
    }
    target.verify_routes(first.items(), lambda: proof_of(engine))
    source = Weights({name: tensor.clone() for name, tensor in first.items()})
    with fleet(source) as here:
        here.add(target)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        for number in (1, 2):
            new = checkpoint(seed + number)
            source.take(new)
            assert here.sender.send_weights().kind == "delta"
            wanted, now = bits_of(Engine.started(new)), bits_of(engine)
            for name, (address, bits) in now.items():
                assert torch.equal(bits, wanted[name][1]), name
                assert address == before[name][0]


def test_a_receiver_that_joins_late_gets_everything_through_routes() -> None:
    engine, new = Engine.started(checkpoint(0)), checkpoint(1)
    with fleet(Weights(new)) as here:
        here.add(target_of(engine, new))
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        wanted = bits_of(Engine.started(new))
        assert all(torch.equal(bits, wanted[n][1]) for n, (_, bits) in bits_of(engine).items())


class Careful(Matrix):
    """Looks whether its scales were loaded."""

    def work(self) -> None:
        if bool((self.scale.data.isnan() | (self.scale.data < 0)).any()):
            raise RuntimeError("scales were never loaded")
        super().work()


class CarefulEngine(Engine):
    made = Careful


def test_code_that_raises_at_nan_is_watched_with_other_numbers() -> None:
    first = checkpoint(0)
    engine = CarefulEngine.started(first)
    target = target_of(engine, first)
    target.verify_routes(first.items(), lambda: proof_of(engine))
    assert {piece.live for pieces in target.routes().values() for piece in pieces} == {
        *(name for name, _ in engine.named_parameters())
    }


class Merged(Matrix):
    """One scale for both matrices, which are quantized with it again."""

    def work(self) -> None:
        both = self.weight.data.float().view(2, 8, 8) * self.scale.data[:2, :1, None]
        super().work()
        again = (both / self.scale.data.max()).to(FP8).view(16, 8)
        self.weight = nn.Parameter(again.view(torch.int32), requires_grad=False)


class Nibbles(Matrix):
    """Halves of bytes change places."""

    def work(self) -> None:
        super().work()
        bits = self.weight.data.view(torch.uint8)
        swapped = (bits >> 4 | bits << 4).view(torch.int32)
        self.weight = nn.Parameter(swapped, requires_grad=False)


class Sorted(Matrix):
    """Rows in the order of their scales, as kernels of ordered activations want them."""

    def work(self) -> None:
        super().work()
        order = self.scale.data[:4, 0].argsort()
        rows = self.weight.data.view(4, -1)[order].contiguous()
        self.weight = nn.Parameter(rows, requires_grad=False)


class Beside(Matrix):
    """What it makes of its weights lies in an object."""

    def work(self) -> None:
        self.made = {"sum": self.weight.data.float().nan_to_num().sum(1)}
        super().work()


class Failing(Matrix):
    """Looks at its scales first."""

    def work(self) -> None:
        if not bool((self.scale.data > 0).all()):
            raise RuntimeError("scales are positive")
        super().work()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Merged, r"layers\.0\.0\.weight' is computed"),
        (Nibbles, r"layers\.0\.0\.weight' is computed"),
        (Sorted, r"layers\.\d\.\d\.weight"),
        (Beside, r"layers\.\d\.made\.sum"),
        (Failing, r"scales are positive"),
    ],
)
def test_what_is_more_than_moved_is_refused_by_name(made: type[Matrix], said: str) -> None:
    class Kind(Engine):
        pass

    Kind.made = made
    first = checkpoint(0)
    engine = Kind.started(first)
    before = bits_of(engine)
    with pytest.raises(ConfigError, match=said):
        target_of(engine, first).verify_routes(first.items(), lambda: proof_of(engine))
    now = bits_of(engine)
    assert all(
        torch.equal(bits, before[n][1]) and at == before[n][0] for n, (at, bits) in now.items()
    )


def test_another_layout_is_noticed() -> None:
    first = checkpoint(0)
    engine = Engine.started(first)
    target = target_of(engine, first)
    target.parameters()
    matrix = engine.layers[1]
    assert isinstance(matrix, Matrix)
    matrix.scale = nn.Parameter(matrix.scale.data.contiguous(), requires_grad=False)
    with pytest.raises(ConfigError, match="laid out its parameters in another way"):
        target.parameters()


class Rotary(Matrix):
    """Has a table of no checkpoint, of which it makes another dtype when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def run(self) -> None:
        self.table = self.table.bfloat16()


class RotaryEngine(Engine):
    made = Rotary


def test_a_table_that_nothing_writes_may_be_replaced() -> None:
    first, new = checkpoint(0), checkpoint(1)
    engine = RotaryEngine.started(first)
    target = target_of(engine, first)
    target.verify_routes(first.items(), lambda: proof_of(engine))
    source = Weights({name: tensor.clone() for name, tensor in first.items()})
    with fleet(source) as here:
        here.add(target)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        for layer in engine.layers:
            assert isinstance(layer, Rotary)
            layer.run()
        source.take(new)
        assert here.sender.send_weights().kind == "delta"
    wanted = bits_of(RotaryEngine.started(new))
    assert all(torch.equal(bits, wanted[n][1]) for n, (_, bits) in bits_of(engine).items())
    target.check_unmoved()


@pytest.mark.parametrize("name", ["weight", "scale", "late", "saved"])
def test_nothing_else_may_be_replaced(name: str) -> None:
    engine = RotaryEngine.started(checkpoint(0))
    first = engine.layers[0]
    first.register_buffer("saved", torch.zeros(2))
    target = target_of(engine, checkpoint(0))
    target.bind(target.parameters())
    if name == "late":
        first.register_buffer(name, torch.zeros(1), persistent=False)
    elif name == "saved":
        first.register_buffer(name, torch.zeros(2))
    else:
        parameter = first.get_parameter(name)
        parameter.data = parameter.data.clone()
    with pytest.raises(TargetMoved):
        target.check_unmoved()
    with pytest.raises(TargetMoved):
        target.check_unmoved()
