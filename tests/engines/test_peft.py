"""LoRA by PEFT: merged into the base model, or adapters alone, against what PEFT itself makes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from peft import (
    LNTuningConfig,
    LoraConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, sync_after_step
from deltasync.errors import ConfigError
from deltasync.integrations.peft import MergedSource, adapter_only
from tests.worlds.links import bits_equal, fleet


class Base(nn.Module):
    """An embedding, a convolution, two linear layers, and a head that is trained whole."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.conv(self.embed(tokens).mT).mT
        out: Tensor = self.head(self.down(self.up(hidden).relu()))
        return out


def model_of(dtype: torch.dtype, **settings: Any) -> Any:
    torch.manual_seed(0)
    settings = {"target_modules": ["embed", "conv", "up"], "modules_to_save": ["head"]} | settings
    config = LoraConfig(r=4, lora_alpha=9, init_lora_weights=False, **settings)
    return get_peft_model(Base().to(dtype), config, autocast_adapter_dtype=False)


def train(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randint(11, (2, 5))).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"modules_to_save": None}])
def test_a_merged_source_is_what_peft_merges(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    model = model_of(dtype, **settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source, engine = MergedSource(model), Base().to(dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with fleet(source) as here:
        here.add(engine)
        here.wait(1)
        with torch.inference_mode():
            here.sender.send_weights()
        hook = sync_after_step(optimizer, here.sender, on_error="raise")
        for number in range(4):
            train(model, number)
            optimizer.step()
            optimizer.zero_grad()
            assert bits_equal(engine, deepcopy(model).merge_and_unload())
        assert hook.last_stats is not None
        assert hook.last_stats.kind == "delta"
    for name, tensor in model.state_dict().items():
        assert "lora_" in name or "modules_to_save" in name or torch.equal(before[name], tensor)


def two_active() -> Any:
    model = model_of(torch.float32, modules_to_save=None)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model


def of_more_precision() -> Any:
    """Adapters of float32, as by default, which are rounded as PEFT rounds them."""
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["embed", "conv", "up"])
    return get_peft_model(Base().bfloat16(), config)


def tied(*targets: str) -> Any:
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=list(targets))
    with catch_warnings(action="ignore"):
        return get_peft_model(Base(tied=True), config)


def of_odd_names() -> Any:
    base = nn.ModuleDict({"up": nn.Linear(8, 8), "lora_router": nn.Linear(8, 8)})
    return get_peft_model(base, LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))


@pytest.mark.parametrize(
    "make",
    [two_active, of_more_precision, partial(tied, "embed"), partial(tied, "head"), of_odd_names],
)
def test_what_is_merged_goes_under_all_names_of_the_base_model(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    with catch_warnings(action="ignore"):
        assert_merged(MergedSource(model), model)


def test_the_adapter_that_is_active_now_is_merged() -> None:
    model = model_of(torch.float32)
    settings: dict[str, Any] = {"target_modules": ["up"], "modules_to_save": ["head"]}
    model.add_adapter("other", LoraConfig(r=2, init_lora_weights=False, **settings))
    with torch.no_grad():
        model.base_model.model.head.modules_to_save["other"].weight.add_(1)
    source = MergedSource(model)
    assert_merged(source, model)
    model.set_adapter("other")
    assert_merged(source, model)


def assert_merged(source: MergedSource, model: Any) -> None:
    found = {name: one.tensor for one in source.tensors() for name in one.names}
    wanted = deepcopy(model).merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def of_tokens() -> Any:
    settings: dict[str, Any] = {"trainable_token_indices": {"embed": [1]}}
    return model_of(torch.float32, target_modules=["up"], **settings)


def partitioned(path: str) -> Any:
    """As ZeRO-3 leaves it; others are small, and stay whole. Merged, nothing would add zeros."""
    model = model_of(torch.float32)
    weight = model.base_model.model.get_parameter(path)
    weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    return model


def merged_in_place() -> Any:
    model = model_of(torch.float32)
    MergedSource(model).tensors()
    model.merge_adapter()
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of_tokens, "embed.*Trainable"),
        (partial(model_of, torch.float32, use_dora=True), "only plain LoRA"),
        (partial(tied, "embed", "head"), "tied"),
        (merged_in_place, r"up.*unmerge|conv.*unmerge|embed.*unmerge"),
        (
            partial(partitioned, "up.base_layer.weight"),
            r"up\.base_layer\.weight: \(0,\) is held here.*GatheredParameters",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MergedSource(make()).tensors()


class Attention(nn.Module):
    """Two linear layers with biases, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.norm(self.query(hidden) * self.value(hidden))
        return out


ADAPTERS: dict[str, Any] = {
    "a module that is trained whole": LoraConfig(
        target_modules=["query"], modules_to_save=["value"]
    ),
    "biases of adapted layers": LoraConfig(bias="lora_only", target_modules=["query"]),
    "all biases": LoraConfig(bias="all", target_modules=["query"]),
    "DoRA": LoraConfig(use_dora=True, target_modules=["query", "value"]),
    "VeRA": VeraConfig(target_modules=["query", "value"]),
    "norms": LNTuningConfig(target_modules=["norm"]),
}


@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_all_that_peft_trains_and_saves_of_an_adapter_is_sent_by_its_name(config: Any) -> None:
    """And nothing else: the engine's base model, which is another, stays."""
    torch.manual_seed(0)
    trainer, engine = (get_peft_model(Attention(), deepcopy(config)) for _ in range(2))
    saved = get_peft_model_state_dict(trainer)
    pointers = {tensor.data_ptr() for tensor in saved.values()}
    served = {name for name, one in trainer.state_dict().items() if one.data_ptr() in pointers}
    base = {n: tensor.clone() for n, tensor in engine.state_dict().items() if n not in served}
    source = ModuleSource(trainer, rename=adapter_only(trainer))
    assert {name for one in source.tensors() for name in one.names} == saved.keys()
    optimizer = torch.optim.AdamW([p for p in trainer.parameters() if p.requires_grad], lr=0.01)
    with fleet(source) as here:
        here.add(ModuleTarget(engine, rename=adapter_only(engine)))
        here.wait(1)
        sync_after_step(optimizer, here.sender, on_error="raise")
        for _ in range(3):
            trainer(torch.randn(2, 5, 8)).square().mean().backward()
            optimizer.step()
    received, sent = get_peft_model_state_dict(engine), get_peft_model_state_dict(trainer)
    assert all(torch.equal(received[name], sent[name]) for name in saved)
    now = engine.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())


def test_an_adapter_that_is_not_there_is_refused() -> None:
    for model, adapter in ((model_of(torch.float32), "other"), (Base(), "default")):
        with pytest.raises(ConfigError, match=f"has no adapter '{adapter}'"):
            adapter_only(model, adapter)
