"""Trainers of bfloat16 or float32 that serve quantized weights, one form or several."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, SenderOptions, sync_after_step
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from tests.quant.served import assert_holds, cold, engine, plain, served, step, trainer
from tests.worlds.links import fleet

FORMS: list[Form] = [
    BlockFp8(),
    BlockFp8("ue8m0"),
    Fp8("channel"),
    Fp8("tensor"),
    Int8(),
    MxFp8(),
]


@pytest.mark.promise(
    "Bits",
    "An engine that serves a quantized form holds what it would load from a checkpoint of the "
    "trainer's weights.",
)
@pytest.mark.timeout(300)  # Triton's interpreter takes long, beside other tests
@pytest.mark.parametrize(
    ("form", "kernels"),
    [*((form, "torch") for form in FORMS), (BlockFp8(), "triton"), (Fp8("tensor"), "triton")],
    ids=str,
)
def test_an_engine_holds_what_a_cold_load_gives(
    form: Form, kernels: Literal["torch", "triton"]
) -> None:
    """Through steps that change nothing, little and all; engines may hold scales as float32."""
    dtypes = [torch.bfloat16] if kernels == "triton" else [torch.bfloat16, torch.float32]
    for dtype in dtypes:
        is_wide = form in (Fp8("channel"), Fp8("tensor"), Int8()) and kernels == "torch"

        def loaded(source: nn.Module, is_wide: bool = is_wide) -> dict[str, Tensor]:
            return {
                name: tensor.float() if is_wide and name.endswith("_scale") else tensor
                for name, tensor in cold(source, form).items()
            }

        source = trainer(0, dtype)
        replicas = [engine(cold(source, form)), engine(loaded(source))][: 1 + is_wide]
        options = SenderOptions(kernels=kernels)
        for replica in replicas:
            with fleet(served(source, form), options=options) as here:
                here.add(replica)
                here.wait(1)
                for number, share in enumerate([0, 0.01, 1, 0]):
                    step(source, share, number)
                    stats = here.sender.send_weights(timeout_s=60)
                    wide = replica is not replicas[0]
                    assert_holds(replica, loaded(source) if wide else cold(source, form))
                assert stats.nnz == 0


@pytest.mark.promise(
    "Bits",
    "An engine that serves a quantized form holds what it would load from a checkpoint of the "
    "trainer's weights.",
)
@pytest.mark.parametrize(("on_busy", "dtype"), [(None, torch.bfloat16), ("wait", torch.float32)])
def test_engines_of_two_forms_follow_one_trainer(
    on_busy: Literal["wait"] | None, dtype: torch.dtype
) -> None:
    source, form = trainer(0, dtype), BlockFp8()
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-4)
    replicas = [engine(plain(source)), engine(plain(source)), engine(cold(source, form))]
    own = ModuleSource(source)
    with ExitStack() as stack:
        hooks = []
        for weights, here in ((own, replicas[:2]), (served(source, form), replicas[2:])):
            ends = stack.enter_context(fleet(weights))
            for number, replica in enumerate(here):
                ends.add(replica, engine=f"{number}")
            ends.wait(len(here))
            hooks.append(sync_after_step(optimizer, ends.sender, on_busy=on_busy, on_error="raise"))
        for _ in range(4):
            for parameter in source.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        for hook in hooks:
            hook.wait()
        for replica in replicas[:2]:
            assert_holds(replica, plain(source))
        assert_holds(replicas[2], cold(source, form))
        bf16, fp8 = (hook.last_stats for hook in hooks)
        assert bf16 is not None
        assert fp8 is not None
        assert (bf16.receivers, fp8.receivers) == (2, 1)
        assert fp8.payload_bytes < bf16.payload_bytes
