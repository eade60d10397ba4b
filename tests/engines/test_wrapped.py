"""Trainers' models in wrappers, and objects that are no such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from deltasync.errors import ConfigError
from deltasync.integrations.peft import MergedSource
from deltasync.integrations.transformers import TransformersSource, transformers_target
from tests.engines.test_transformers import model_of
from tests.worlds.links import bits_equal, fleet


class Distributed(nn.Module):
    """Holds a model as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def by_layer(model: Any) -> Any:
    """With its layer compiled, as regional compilation does."""
    layers = (model.get_base_model() if hasattr(model, "peft_config") else model).model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    return model


def whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [by_layer, whole, Distributed, lambda m: Distributed(whole(m))])
def test_wrappers_leave_no_trace_in_names(wrap: Any, tmp_path: Path) -> None:
    trainer, engine, other = (model_of("LlamaForCausalLM", tmp_path, seed) for seed in (0, 1, 2))
    names = set(engine.state_dict())
    with fleet(TransformersSource(wrap(trainer))) as made:
        made.add(transformers_target(engine))
        made.wait(1)
        made.sender.send_weights(timeout_s=30)
        assert bits_equal(engine, model_of("LlamaForCausalLM", tmp_path, 0))
    merged = MergedSource(wrap(adapted(other))).tensors()
    assert {name for one in merged for name in one.names} == names


def test_sources_take_other_names_and_refuse_one_for_two_tensors(tmp_path: Path) -> None:
    """As hints of layouts that differ suggest."""
    model = model_of("LlamaForCausalLM", tmp_path, 0)

    def short(name: str) -> str | None:
        return None if name == "lm_head.weight" else name.removeprefix("model.")

    wanted = {name for own in model.state_dict() if (name := short(own)) is not None}
    other = adapted(model_of("LlamaForCausalLM", tmp_path, 1))
    for make, one in ((TransformersSource, model), (MergedSource, other)):
        source: Any = make(one, rename=short)
        assert {name for tensor in source.tensors() for name in tensor.names} == wanted
        with pytest.raises(ConfigError, match="two tensors are named 'w'; change `rename`"):
            make(one, rename=lambda _: "w").tensors()


@pytest.mark.parametrize("given", [nn.Linear(2, 2), Distributed(nn.Linear(2, 2)), {}, None])
def test_what_is_no_such_model_is_refused_by_its_type(given: Any) -> None:
    for make, kind in ((TransformersSource, "PreTrainedModel"), (MergedSource, "PeftModel")):
        with pytest.raises(ConfigError, match=f"takes a {kind}, and this is a"):
            make(given)


def test_the_other_kind_of_model_is_refused_by_its_type(tmp_path: Path) -> None:
    model = model_of("LlamaForCausalLM", tmp_path, 0)
    with pytest.raises(ConfigError, match="takes a PeftModel, and this is a Llama"):
        MergedSource(model)
    with pytest.raises(ConfigError, match="takes a PreTrainedModel, and this is a PeftModel"):
        TransformersSource(adapted(model))
