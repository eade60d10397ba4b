"""Whole syncs whose payloads kernels code and decode, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltasync import ReceiverOptions, RoutedTarget, SenderOptions
from deltasync.delta.backend import Kernels
from deltasync.delta.policy import Policy
from deltasync.errors import SyncAborted, WrongBase
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import Bucket
from tests.sync.decodings import decodings
from tests.sync.interpreted import one_kernel_at_a_time
from tests.sync.test_coded import nudged
from tests.sync.test_parts import CHECKPOINT, rank_of, trainer
from tests.worlds.links import Model, ThroughReceiver, bits_equal, fleet, until

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here: see test_gpu.py", allow_module_level=True)

BLOCKS = SenderOptions(
    compression="block",
    kernels="triton",
    policy=Policy(dense_above=0.9, chunk_numel=1000),
    max_inflight_bytes=1 << 20,
)


@pytest.fixture
def decoded_there(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    return decodings(monkeypatch)


def model(seed: int, rows: int = 40, masters: int = 3000) -> Model:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (rows, 500), "b": (17,), "c": (), "d": (masters,), "e": (0, 4)}
    made = {n: torch.randn(s, generator=generator) * 0.02 for n, s in shapes.items()}
    return Model({n: t if n == "d" else t.bfloat16() for n, t in made.items()})


def change(source: Model, seed: int, share: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in "abc":
        nudged(source.get_parameter(name).data, share, generator)
    masters = source.get_parameter("d").data
    masters[torch.rand(len(masters), generator=generator) < share] *= 1.0001


@pytest.mark.parametrize("sender", ["triton", "torch"])
@pytest.mark.parametrize("bucket_bytes", [3000, None])
def test_ends_agree_wherever_payloads_are_coded(
    sender: Kernels, bucket_bytes: int | None, decoded_there: list[Tensor | None]
) -> None:
    source, *targets = (model(1) for _ in range(4))
    options = BLOCKS.model_copy(update={"kernels": sender, "bucket_bytes": bucket_bytes})
    ways: list[tuple[Kernels, int | None]] = [("triton", None), ("triton", 0), ("torch", None)]
    with fleet(source, options=options) as here:
        for nth, (target, (kernels, staged)) in enumerate(zip(targets, ways, strict=True)):
            receiving = ReceiverOptions(kernels=kernels, max_staged_bytes=staged)
            here.add(target, engine=f"{nth}", options=receiving)
        here.wait(3)
        assert here.sender.send_weights().full_synced == 0
        for seed, share in enumerate((0.02, 0.3)):
            change(source, seed, share)
            stats = here.sender.send_weights()
            assert (stats.receivers, stats.lost) == (3, {})
            assert all(bits_equal(source, target) for target in targets)
            assert sum(stats.bytes_by_codec.values()) == stats.payload_bytes
            assert stats.bytes_by_codec["block"] > 0.6 * stats.payload_bytes
            assert stats.payload_bytes < 4 * stats.nnz
    assert any(one is not None for one in decoded_there) if sender == "triton" else True


def test_a_full_sync_is_sent_as_it_is() -> None:
    source, target = model(1), model(2)
    with fleet(source, options=BLOCKS) as here:
        here.add(target, options=ReceiverOptions(kernels="triton"))
        here.wait(1)
        stats = here.sender.send_weights()
        assert stats.full_synced == 1
        assert stats.bytes_by_codec == {"none": stats.payload_bytes}
        assert bits_equal(source, target)


def test_what_is_written_while_it_is_packed_stays_raw() -> None:
    """Changes that are not held until the decision: their old bits are gone."""
    source, target = model(1), model(1)
    options = BLOCKS.model_copy(update={"max_inflight_bytes": 0})
    with fleet(source, options=options) as here:
        here.add(target, options=ReceiverOptions(kernels="triton"))
        here.wait(1)
        here.sender.send_weights()
        for seed in range(2):
            change(source, seed)
            stats = here.sender.send_weights()
            assert stats.bytes_by_codec == {"none": stats.payload_bytes}
            assert bits_equal(source, target)


@pytest.mark.promise(
    "Errors",
    "A GPU decodes and refuses the payloads that the host decodes and refuses, before "
    "anything is written.",
)
@pytest.mark.parametrize("staged_bytes", [None, 0])
def test_a_wrong_base_is_found_before_anything_is_written(staged_bytes: int | None) -> None:
    source, target = model(1), model(1)
    with fleet(source, options=BLOCKS) as here:
        options = ReceiverOptions(kernels="triton", max_staged_bytes=staged_bytes, scrub_every=0)
        serving = here.add(target, options=options)
        here.wait(1)
        here.sender.send_weights()
        source.get_parameter("a").data.view(torch.int16)[0] ^= 1
        found = target.get_parameter("a").data
        found.view(torch.int16)[0, 7] ^= 4  # something else has written to it
        before = {n: p.data.clone() for n, p in target.named_parameters()}
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=20)
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[-1], WrongBase)
        assert all(torch.equal(before[n], p.data) for n, p in target.named_parameters())
        assert not serving.receiver.is_dirty
        here.wait(1)
        assert here.sender.send_weights(timeout_s=20).full_synced == 1
        assert bits_equal(source, target)


class Damaged(ThroughReceiver):
    """A link on which the first coded payload loses a bit."""

    def __init__(self, inner: ReceiveTransport, at: int) -> None:
        super().__init__(inner)
        self._at, self._is_done = at, False

    def receive(self, *, timeout_s: float) -> Frame:
        frame = super().receive(timeout_s=timeout_s)
        if frame.payload is None or self._is_done:
            return frame
        message, _ = decode(frame.header)
        if not isinstance(message, Bucket) or message.compression != "coded":
            return frame
        self._is_done, payload = True, frame.payload.clone()
        payload[self._at] ^= 16
        return Frame(encode(message, payload_bytes=len(payload)), payload)


@pytest.mark.promise(
    "Errors",
    "A GPU decodes and refuses the payloads that the host decodes and refuses, before "
    "anything is written.",
)
@pytest.mark.parametrize("at", [3, 60, 100, -1, -200, -2000])
def test_damage_loses_nothing(at: int) -> None:
    source, target = model(1), model(1)
    with fleet(source, options=BLOCKS) as here:
        options = ReceiverOptions(kernels="triton")
        serving = here.add(target, options=options, wrap=lambda link: Damaged(link, at))
        here.wait(1)
        here.sender.send_weights()
        change(source, 1)
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=20)
        until(lambda: bool(serving.errors))
        assert bits_equal(target, model(1))
        assert not serving.receiver.is_dirty
        here.wait(1)
        here.sender.send_weights(timeout_s=20)
        assert bits_equal(source, target)


@pytest.mark.parametrize("staged_bytes", [None, 0])
def test_ranks_of_an_engine_decode_their_parts(staged_bytes: int | None) -> None:
    source, generator = trainer(0), torch.Generator().manual_seed(0)
    ranks = [rank_of(source, number) for number in range(2)]
    receiving = ReceiverOptions(kernels="triton", max_staged_bytes=staged_bytes, chunk_numel=7)
    with fleet(source, options=BLOCKS) as here:
        for number, rank in enumerate(ranks):
            target = RoutedTarget(rank, CHECKPOINT)
            here.add(target, rank=number, world=2, options=receiving)
        here.wait(2)
        here.sender.send_weights()
        for share in (0.2, 0.6):
            for weights in source.parameters():
                chosen = torch.rand(weights.shape, generator=generator) < share
                weights.data[chosen] *= 1.01
            stats = here.sender.send_weights()
            assert stats.receivers == 2
            assert all(bits_equal(rank, rank_of(source, rank.rank)) for rank in ranks)
        assert "block" in stats.bytes_by_codec
