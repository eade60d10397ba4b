"""Engines that repack codes of 4 bits are written in place, code by code."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import pad

from deltasync import ReceiverOptions
from deltasync.delta.backend import Kernels, backend_for
from deltasync.delta.bits import as_bits
from deltasync.delta.codes import Codes
from deltasync.delta.digests import DigestLedger
from deltasync.engines.learnt import LearntTarget
from deltasync.engines.proof.learnt import learn_routes
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import ConfigError, SyncAborted
from tests.engines.checkpoints import Weights
from tests.engines.repacked import packed, tiles_like_machete, tiles_of_marlin, unpacked
from tests.sync.test_learnt import Engine, Matrix, bits_of, proof_of, target_of
from tests.worlds.links import Fleet, StubbornLearnt, fleet, until

ROWS, COLS, GROUP = 64, 96, 32  # of each of two fused matrices


def padded(words: Tensor) -> Tensor:
    """Marlin's order of a matrix with more inputs and outputs, which are zeros."""
    return tiles_of_marlin(pad(words, (0, 4, 0, 64)))


class Int4(Matrix):
    """Two fused matrices of 4-bit codes, as compressed-tensors packs them."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        words = torch.empty(2 * ROWS, COLS // 8, dtype=torch.int32)
        self.weight_packed = nn.Parameter(words, requires_grad=False)
        scales = torch.empty(2 * ROWS, COLS // GROUP, dtype=torch.bfloat16)
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        shape = torch.empty(2, dtype=torch.int64)
        self.weight_shape = nn.Parameter(shape, requires_grad=False)

    def load(self, which: str, part: int, tensor: Tensor) -> None:
        if which == "weight_shape":  # that of the last part stays
            self.weight_shape.data.copy_(tensor)
        else:
            super().load(which, part, tensor)

    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        return tiles_of_marlin(words)

    def work(self) -> None:
        made = self.repacked(self.weight_packed.data)
        self.weight_packed = nn.Parameter(made, requires_grad=False)
        self.weight_scale.data = self.weight_scale.data.t().contiguous()


class LikeMachete(Int4):
    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        return tiles_like_machete(words)


class Padded(Int4):
    def __init__(self) -> None:
        super().__init__()
        shape = torch.empty(2, dtype=torch.bfloat16)  # as vLLM's mixtures have it
        self.weight_shape = nn.Parameter(shape, requires_grad=False)

    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        return padded(words)


class Signed(Int4):
    """Codes become signed as well."""

    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        return tiles_of_marlin(words) ^ -0x77777778


class OfInt4(Engine):
    made = Int4


class OfLikeMachete(Engine):
    made = LikeMachete


class OfPadded(Engine):
    made = Padded


class OfSigned(Engine):
    made = Signed


ENGINES = [OfInt4, OfLikeMachete, OfPadded]


def checkpoint(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {"norm": torch.randn(8, generator=generator).bfloat16()}
    for layer in range(3):
        for part in range(2):
            bits = torch.randint(0, 256, (ROWS, COLS // 2), generator=generator, dtype=torch.uint8)
            found[f"layers.{layer}.{part}.weight_packed"] = bits.view(torch.int32)
            scales = torch.rand(ROWS, COLS // GROUP, generator=generator)
            found[f"layers.{layer}.{part}.weight_scale"] = scales.bfloat16()
            found[f"layers.{layer}.{part}.weight_shape"] = torch.tensor([ROWS + part, COLS])
    return found


def changed(weights: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Some codes of some words become others."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in found.items():
        if name.endswith("weight_packed"):
            codes = torch.randint(1, 16, (tensor.numel(), 8), generator=generator)
            codes *= torch.rand(codes.shape, generator=generator) < share
            tensor ^= packed(codes.int()).view(tensor.shape)
    return found


def copied(weights: dict[str, Tensor]) -> Weights:
    return Weights({name: tensor.clone() for name, tensor in weights.items()})


def check(
    engine: Engine, weights: dict[str, Tensor], before: dict[str, tuple[int, Tensor]]
) -> None:
    """The engine is what a fresh one would be, and where it was."""
    wanted = bits_of(type(engine).started(weights))
    for name, (address, bits) in bits_of(engine).items():
        assert torch.equal(bits, wanted[name][1]), name
        assert address == before[name][0]


@settings(max_examples=12)
@given(
    made=st.sampled_from(ENGINES),
    seed=st.integers(0, 1 << 20),
    share=st.floats(0.001, 1),
    kernels=st.sampled_from(get_args(Kernels)),
)
def test_any_history_leaves_what_the_engine_would_make(
    made: type[Engine], seed: int, share: float, kernels: Kernels
) -> None:
    first = checkpoint(seed)
    engine = made.started(first)
    before = bits_of(engine)
    target = target_of(engine, first)
    target.verify_routes(first.items(), lambda: proof_of(engine))
    check(engine, first, before)
    source = copied(first)
    with fleet(source) as here:
        here.add(target, options=ReceiverOptions(kernels=kernels))
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        for number in (1, 2, 3):
            new = changed(source.weights, share, seed + number)
            source.take(new)
            assert here.sender.send_weights().kind == "delta"
            check(engine, new, before)
        source.take(new := checkpoint(seed + 9))  # all of it: dense
        assert here.sender.send_weights().kind == "delta"
        check(engine, new, before)


@pytest.mark.parametrize("made", ENGINES)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("max_staged_bytes", [None, 0])
def test_a_receiver_that_joins_late_gets_everything_through_routes(
    made: type[Engine], max_staged_bytes: int | None, kernels: Kernels
) -> None:
    """Staged, and written at once where there is no memory to stage."""
    first, new = checkpoint(0), checkpoint(1)
    engine = made.started(first)
    before, source, target = bits_of(engine), copied(new), target_of(engine, new)
    target.verify_routes(first.items())
    with fleet(source) as here:
        here.add(
            target, options=ReceiverOptions(max_staged_bytes=max_staged_bytes, kernels=kernels)
        )
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        check(engine, new, before)
        source.take(new := changed(new, 0.05, 2))
        here.sender.send_weights()
        check(engine, new, before)


def failing_target(engine: Engine, weights: dict[str, Tensor]) -> StubbornLearnt:
    tensors = [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    return StubbornLearnt(engine, tensors, learn_routes(proof_of(engine), tensors))


def joined(here: Fleet, target: LearntTarget, options: ReceiverOptions | None = None) -> None:
    here.add(target, options=options)
    here.wait(1)
    here.sender.send_weights()


@pytest.mark.parametrize("made", ENGINES)
@pytest.mark.parametrize("share", [0.002, 0.9])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_sync_that_fails_after_it_has_written_is_undone(
    made: type[Engine], share: float, kernels: Kernels
) -> None:
    first = checkpoint(0)
    engine, source = made.started(first), copied(first)
    before, target = bits_of(engine), failing_target(engine, first)
    target.verify_routes(first.items())
    with fleet(source) as here:
        joined(here, target, ReceiverOptions(kernels=kernels))
        source.take(new := changed(first, share, 1))
        target.fails = True
        with pytest.raises(SyncAborted, match="planted"):
            here.sender.send_weights()
        check(engine, first, before)
        here.wait(1)
        here.sender.send_weights()
        check(engine, new, before)


@pytest.mark.parametrize("made", ENGINES)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_code_that_somebody_else_changed_is_found_and_healed(
    made: type[Engine], kernels: Kernels
) -> None:
    first = checkpoint(0)
    engine, source = made.started(first), copied(first)
    before, target = bits_of(engine), target_of(engine, first)
    target.verify_routes(first.items())
    with fleet(source) as here:
        joined(here, target, ReceiverOptions(scrub_every=1, kernels=kernels))
        serving = here.serving["engine/0"]
        live = engine.layers[1].get_parameter("weight_packed").data
        live[0, 0] ^= 1 << 13
        source.take(new := changed(first, 0.01, 1))
        with contextlib.suppress(SyncAborted):  # if it has left between the two
            here.sender.send_weights()
        until(lambda: bool(serving.errors))
        assert any("layers.1" in str(error) for error in serving.errors)
        here.wait(1)
        here.sender.send_weights()
        check(engine, new, before)


def test_codes_that_are_changed_as_well_are_refused_by_name() -> None:
    first = checkpoint(0)
    engine = OfSigned.started(first)
    before = bits_of(engine)
    with pytest.raises(ConfigError, match=r"layers\.0\.0\.weight_packed' is computed"):
        target_of(engine, first).parameters()
    check(engine, first, before)


@pytest.mark.parametrize("made", ENGINES)
def test_kernels_find_the_codes_of_real_orders(made: type[Engine]) -> None:
    first = checkpoint(0)
    engine = made.started(first)
    target = target_of(engine, first)
    held = target.bind(target.parameters())
    codes = [live for live in held.values() if isinstance(live, Codes)]
    assert len(codes) == 6
    for live in codes:
        assert live.boxes() == []  # no element has an address
        assert len(live.spread() or ()) == 1


def test_orders_that_kernels_do_not_find_are_written_by_torch() -> None:
    """Here the high codes of a word are in another order than the low ones."""

    class Uneven(Int4):
        @staticmethod
        def repacked(words: Tensor) -> Tensor:
            codes = unpacked(words).view(*words.shape, 8)
            low, high = codes[..., :4], codes[..., 4:].transpose(0, 1)
            return packed(torch.cat([low.flatten(), high.flatten()])).view(words.shape)

    class OfUneven(Engine):
        made = Uneven

    first = checkpoint(0)
    engine = OfUneven.started(first)
    before, target = bits_of(engine), target_of(engine, first)
    target.verify_routes(first.items(), lambda: proof_of(engine))
    held = target.bind(target.parameters())
    assert all(live.spread() is None for live in held.values() if isinstance(live, Codes))
    with pytest.raises(ConfigError, match="spread over words in another way"):
        backend_for(held, DigestLedger((), chunk_numel=1), kernels="triton")
    source = copied(first)
    with fleet(source) as here:
        joined(here, target)
        source.take(new := changed(first, 0.01, 1))
        here.sender.send_weights()
        check(engine, new, before)


def test_the_last_layer_is_proved_too() -> None:
    """One layer of a kind is learnt; another one that works otherwise is refused."""

    class Odd(OfInt4):
        def __init__(self) -> None:
            super().__init__()
            last = self.layers[2]
            assert isinstance(last, Int4)
            last.repacked = lambda words: tiles_of_marlin(words.flip(0))  # type: ignore[method-assign]

    first = checkpoint(0)
    engine = Odd.started(first)
    before = {name: as_bits(one.data).clone() for name, one in engine.named_parameters()}
    with pytest.raises(ConfigError, match=r"layers\.2\.\d\.weight_packed"):
        target_of(engine, first).verify_routes(first.items(), lambda: proof_of(engine))
    after = dict(engine.named_parameters())
    assert all(torch.equal(as_bits(after[name].data), bits) for name, bits in before.items())


@pytest.mark.parametrize("made", ENGINES)
def test_shapes_that_are_loaded_over_each_other_may_not_change(made: type[Engine]) -> None:
    first = checkpoint(0)
    engine, source = made.started(first), copied(first)
    before, target = bits_of(engine), target_of(engine, first)
    target.verify_routes(first.items(), lambda: proof_of(engine))
    assert set(target.learnt.fixed) == {name for name in first if name.endswith("shape")}
    with fleet(source) as here:
        here.add(target)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        new = changed(first, 0.01, 1) | {"layers.1.0.weight_shape": torch.tensor([1, COLS])}
        source.take(new)
        with pytest.raises(SyncAborted, match=r"'layers\.1\.0\.weight_shape' may not change"):
            here.sender.send_weights()
        check(engine, first, before)
        source.take(new := new | {"layers.1.0.weight_shape": first["layers.1.0.weight_shape"]})
        here.wait(1)
        here.sender.send_weights()
        check(engine, new, before)


def test_an_engine_that_was_started_on_other_shapes_takes_no_weights() -> None:
    first = checkpoint(0)
    engine = OfInt4.started(first)
    target = target_of(engine, first)
    target.verify_routes(first.items(), lambda: proof_of(engine))
    other = first | {"layers.2.0.weight_shape": torch.tensor([1, COLS])}
    before = bits_of(engine)
    with fleet(copied(other)) as here:
        here.add(target)
        here.wait(1)
        with pytest.raises(SyncAborted, match=r"'layers\.2\.0\.weight_shape' may not change"):
            here.sender.send_weights()
        check(engine, first, before)
