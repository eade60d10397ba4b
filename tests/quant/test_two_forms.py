"""One trainer, engines of two forms: a sender for each, over one module."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, sync_after_step
from deltasync.delta.bits import as_bits
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.served import ServedSource, served_weights
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.transports import inprocess
from tests.quant.test_served import cold, engine, forms, trainer
from tests.worlds.links import Serving

FORM = BlockFp8()


def plain(source: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in source.state_dict().items()}


@pytest.mark.promise(
    "Bits",
    "An engine that serves a quantized form holds what it would load from a checkpoint of the "
    "trainer's weights.",
)
@pytest.mark.parametrize("on_busy", [None, "wait"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_engines_of_two_forms_follow_one_trainer(on_busy: str | None, dtype: torch.dtype) -> None:
    source = trainer(0, dtype)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-4)
    replicas = [engine(plain(source)), engine(plain(source)), engine(cold(source, FORM))]
    own = ModuleSource(source)
    with ExitStack() as stack:
        senders, hooks = [], []
        for form, served in ((plain, own), (cold, ServedSource(own, forms(FORM)))):
            transport = inprocess.Sender()
            sender = stack.enter_context(WeightSender(served, transport))
            here = replicas[2:] if form is cold else replicas[:2]
            for number, replica in enumerate(here):
                receiver = WeightReceiver(
                    ModuleTarget(replica), transport.receiver(), engine=f"{number}"
                )
                stack.callback(Serving(receiver).start().stop)
            sender.wait_for_receivers(len(here), timeout_s=10)
            senders.append(sender)
            hooks.append(
                sync_after_step(optimizer, sender, on_busy=on_busy, on_error="raise")  # type: ignore[arg-type]
            )
        for _ in range(4):
            for parameter in source.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        for hook in hooks:
            hook.wait()
        for replica in replicas[:2]:
            assert_holds(replica, plain(source))
        assert_holds(replicas[2], cold(source, FORM))
        bf16, fp8 = (hook.last_stats for hook in hooks)
        assert bf16 is not None
        assert fp8 is not None
        assert (bf16.receivers, fp8.receivers) == (2, 1)
        assert fp8.payload_bytes < bf16.payload_bytes


def assert_holds(replica: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in replica.state_dict().items():
        assert torch.equal(as_bits(tensor), as_bits(expected[name])), name


def test_weights_that_are_gathered_are_served() -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, FORM))
    transport, weights = inprocess.Sender(), StreamedWeights()
    with WeightSender(weights, transport) as sender:
        serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
        try:
            for number in range(3):
                gathered = ((name, tensor.clone()) for name, tensor in plain(source).items())
                weights.take(served_weights(gathered, forms(FORM)))
                sender.wait_for_receivers(1, timeout_s=10)
                sender.send_weights(timeout_s=10)
                assert_holds(replica, cold(source, FORM))
                for parameter in source.parameters():
                    parameter.data *= 1 + number / 64
        finally:
            serving.stop()
