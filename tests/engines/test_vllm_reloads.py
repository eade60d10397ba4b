"""Engines that pack their matrices: trainers that come one after the other, and those refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import NamedTensor, SenderOptions, WeightSource
from deltasync.errors import ConfigError, EngineFailed
from tests.engines import cold
from tests.engines.checkpoints import Weights, changed, checkpoint, write_config
from tests.engines.environment import use_cpu
from tests.engines.judge import assert_as_started
from tests.worlds.ranks import run_ranks

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@contextmanager
def started(folder: Path) -> Iterator[tuple[dict[str, Tensor], Any, Any]]:
    """A worker of a small Llama that has just started, and what it was started on."""
    with cold.alone():
        write_config("LlamaForCausalLM", folder)
        weights = {name: tensor * 0.05 for name, tensor in checkpoint(folder, 0).items()}
        model, config = cold.cold(folder, weights)
        yield weights, model, cold.Engine(model, config)


connecting = partial(cold.connecting, without_routes="reload")


def as_floats(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Masters that round to these weights."""
    return {name: tensor.float() for name, tensor in weights.items()}


class Tied(WeightSource):
    """A trainer whose head is its embedding."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def tensors(self) -> list[NamedTensor]:
        own = ((EMBEDDING, HEAD) if name == EMBEDDING else (name,) for name in self._weights)
        pairs = zip(own, self._weights.values(), strict=True)
        return [NamedTensor(names, tensor) for names, tensor in pairs if names != (HEAD,)]


def follow_one_after_the_other(_rank: int, folder: Path) -> None:
    with started(folder) as (weights, model, engine):
        masters = Weights(as_floats(weights))
        with connecting(masters, engine, folder) as sync:
            assert sync.send_weights().full_synced == 0
            weights = changed(weights, 0.01, 1)
            masters.take(as_floats(weights))
            assert sync.send_weights().kind == "delta"
            assert_as_started(model, folder, weights)
        with connecting(masters, engine, folder) as sync:  # a trainer that was restarted
            assert sync.send_weights().full_synced == 0
            assert_as_started(model, folder, weights)
        with connecting(Tied(weights), engine, folder) as sync, pytest.raises(ConfigError):
            sync.connect()  # which leaves what it finds
        rounded = Weights({name: tensor.clone() for name, tensor in weights.items()})
        with connecting(rounded, engine, folder) as sync:
            assert sync.send_weights().full_synced == 0
            weights = changed(weights, 0.01, 2)
            rounded.take(weights)
            assert sync.send_weights().kind == "delta"
            assert_as_started(model, folder, weights)
        options = SenderOptions(leave_out=["lm_head.*"])
        with connecting(rounded, engine, folder, options=options, keep=["lm_head.*"]) as sync:
            assert sync.send_weights().full_synced == 0
            new = changed(weights, 0.01, 3)
            rounded.take(new)
            assert sync.send_weights().kind == "delta"
            assert_as_started(model, folder, new | {HEAD: weights[HEAD]})


def refuse_what_does_not_fit(_rank: int, folder: Path) -> None:
    with started(folder) as (weights, model, engine):
        two = rf"'{HEAD}'.* are tied at the trainer, and differ in what the engine was started on"
        short = weights | {HEAD: weights[HEAD][:-1]}
        shape = rf"^{HEAD}: .* was loaded, the trainer has .*start on what it saves"
        for source, why in ((Tied(weights), two), (Weights(short), shape)):
            with connecting(source, engine, folder) as sync, pytest.raises(ConfigError, match=why):
                sync.connect()
        saved = set(model.state_dict())
        break_once(model)
        source = Weights(weights)
        with connecting(source, engine, folder) as sync:
            with pytest.raises(EngineFailed, match="OSError: in the midst of it"):
                sync.connect()
            assert_as_started(model, folder, weights)
            assert set(model.state_dict()) == saved  # buffers that are not saved stay so
            assert sync.send_weights().full_synced == 0
        assert_as_started(model, folder, weights)


def break_once(model: Any) -> None:
    """Let the loader fail when it has taken a part of a layer, and is not only watched.

    It has taken away the buffers that are not saved, too.
    """
    load, failures = model.load_weights, iter([True])

    def load_weights(weights: Iterator[tuple[str, Tensor]]) -> None:
        some = list(islice(weights, 5))
        if some[0][1].is_meta or not next(failures, False):
            load(chain(some, weights))
            return
        load(iter(some))
        for module in model.modules():
            for name in list(module._non_persistent_buffers_set):
                delattr(module, name)
        raise OSError("in the midst of it")

    model.load_weights = load_weights


def keep_a_tower(_rank: int, folder: Path) -> None:
    """The trainer has frozen its vision tower, which the engine has packed."""
    weights = write_vision_model(folder)
    with cold.alone():
        model, config = cold.cold(folder, weights)
        engine = cold.Engine(model, config)
        source = Weights({name: tensor.clone() for name, tensor in weights.items()})
        frozen = ["*vision_tower.*", "*multi_modal_projector.*"]
        options = SenderOptions(leave_out=frozen)
        with connecting(source, engine, folder, options=options, keep=frozen) as sync:
            assert sync.send_weights().full_synced == 0
            new = changed(weights, 0.01, 1)
            new |= {name: one for name, one in weights.items() if "language_model" not in name}
            source.take(new)
            assert sync.send_weights().kind == "delta"
            assert_as_started(model, folder, new)


def write_vision_model(folder: Path) -> dict[str, Tensor]:
    import transformers
    from safetensors.torch import load_file

    text = {"model_type": "gemma", "vocab_size": 640, "hidden_size": 128}
    text |= {"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision |= {"projection_dim": 128, "vision_use_head": False}
    config = transformers.AutoConfig.for_model(
        "paligemma",
        text_config=text,
        vision_config=vision,
        projection_dim=128,
        hidden_size=128,
        image_token_index=630,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    renamed = ("vision_tower.", "vision_tower.vision_model.")  # as released checkpoints have it
    return {name.replace(*renamed): tensor for name, tensor in saved.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "what", [follow_one_after_the_other, refuse_what_does_not_fit, keep_a_tower]
)
def test_a_worker_with_packed_matrices(
    what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM packs no bf16 matrices on CPUs without AVX512: oneDNN refuses them")
    use_cpu(monkeypatch, packs=True)
    run_ranks(what, 1, tmp_path, timeout_s=580)
