"""LoRA adapters of Hugging Face PEFT: alone, or merged into their base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.delta.bits import check_plain
from deltasync.delta.modes import in_plain_mode
from deltasync.delta.naming import unwrapped
from deltasync.delta.shard import is_sharded
from deltasync.errors import ConfigError
from deltasync.integrations.transformers import unwrapped_module
from deltasync.sync.module import ModuleWatch, named_tensors, renamed, tied_tensors
from deltasync.sync.source.tensors import NamedTensor

_PREFIX = "base_model.model."
_ALONE = "`adapter_only` sends adapters alone"


def adapter_only(model: Any, adapter: str = "default") -> Callable[[str], str | None]:
    """Return a `rename` for a ModuleSource or ModuleTarget of a PeftModel that keeps one adapter.

    Tensors are those that PEFT saves of the adapter, under the same names: also biases and norms
    that it trains. Raises ConfigError if there is no such adapter, or PEFT computes what it saves.
    """
    from peft import get_peft_model_state_dict

    if adapter not in getattr(model, "peft_config", ()):
        raise ConfigError(f"a {type(model).__name__} has no adapter {adapter!r}: give a PeftModel")
    live: dict[str, Any] = model.state_dict()
    saved = get_peft_model_state_dict(model, live, adapter, save_embedding_layers=False)
    names = {id(tensor): name for name, tensor in live.items()}
    if computed := [name for name, tensor in saved.items() if id(tensor) not in names]:
        raise ConfigError(f"{computed[0]}: PEFT computes what it saves, which no tensor holds")
    return {names[id(tensor)]: name for name, tensor in saved.items()}.get


class MergedSource:
    """A PEFT model as its base model with the active adapters merged in: a `WeightSource`.

    Tensors have the base model's names. At every sync the weights that adapters change are computed
    into separate memory, as PEFT's `merge_and_unload` would. The model itself does not change:
    merging and unmerging in place would round its weights each time.

    Args:
        model: The trainer's PeftModel, or what torch.compile or DDP makes of one; read at every
            sync, never written. What such wrappers put into names is left out.
        rename: Maps a name in the base model to the one that receivers know. If it returns None,
            the tensor is left out.
    """

    def __init__(
        self, model: nn.Module, *, rename: Callable[[str], str | None] | None = None
    ) -> None:
        from peft import PeftMixedModel, PeftModel

        self._model: nn.Module = unwrapped_module(
            model, PeftModel, PeftMixedModel, of="MergedSource"
        )
        self._rename = rename
        self._watch: ModuleWatch | None = None
        self._layers: dict[str, tuple[Any, Tensor]] = {}
        self._tensors: list[NamedTensor] = []
        self._active: list[str] = []

    @in_plain_mode
    def tensors(self) -> list[NamedTensor]:
        """Return the merged weights: the list of the last call if nothing moved.

        Raises ConfigError with the name of a layer that cannot be merged this way.
        """
        active: Any = self._model.active_adapters
        if self._watch is None or self._active != active or not self._watch.is_unmoved():
            self._watch, watch = None, ModuleWatch(self._model)
            self._layers = {
                name: (layer, _room(name, layer)) for name, layer in _layers(self._model)
            }
            named = _named(self._model, self._layers)
            self._tensors = tied_tensors(renamed(named, self._rename))
            self._watch, self._active = watch, list(active)
        for name, (layer, merged) in self._layers.items():
            _merge(name, layer, merged)
        return self._tensors


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _room(name: str, layer: Any) -> Tensor:
    """An empty tensor for the merged weight. Raises ConfigError for a layer that cannot merge."""
    from peft.tuners.lora import layer as known

    why = ""
    if type(layer) not in (known.Linear, known.Embedding, known.Conv1d, known.Conv2d, known.Conv3d):
        why = f"{type(layer).__name__} is not a layer whose weight can be merged here"
    elif layer.lora_variant or any(layer.lora_bias.values()):
        why = "only plain LoRA is merged here, without variants such as DoRA and without biases"
    elif is_sharded(layer.get_base_layer().weight):
        why = "it is sharded: each rank would need all of the adapters"
    if why:
        raise ConfigError(f"{name}: {why}; {_ALONE}")
    for own, parameter in layer.named_parameters():
        check_plain(parameter, f"{name}.{own}")
    return torch.empty_like(layer.get_base_layer().weight).requires_grad_()


def _merge(name: str, layer: Any, merged: Tensor) -> None:
    from peft.tuners.lora.layer import Embedding

    if layer.merged_adapters:
        raise ConfigError(f"{name}: it is merged in place: unmerge it")
    merged.copy_(layer.get_base_layer().weight)
    for adapter in layer.active_adapters:
        if adapter in layer.scaling:
            delta = layer.get_delta_weight(adapter)  # PEFT rounds it before adding in embeddings
            merged += delta.to(merged.dtype) if isinstance(layer, Embedding) else delta


def _named(model: nn.Module, layers: dict[str, tuple[Any, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name in the base model, tensor) of everything except adapters. Raises ConfigError."""
    merged = {id(layer.get_base_layer().weight): tensor for layer, tensor in layers.values()}
    if len(merged) < len(layers):
        first = {id(layer.get_base_layer().weight): name for name, (layer, _) in layers.items()}
        other = next(name for name in layers if name not in first.values())
        tied = first[id(layers[other][0].get_base_layer().weight)]
        raise ConfigError(f"{other} and {tied} are adapted and tied; {_ALONE}")
    active: Any = model.active_adapters
    for name, tensor in named_tensors(model):
        if ".original_module." in name or _is_adapter(name, layers):
            continue
        owner, copied, leaf = name.partition(".modules_to_save.")
        if copied:  # a module trained as a whole, with a copy for each adapter
            adapter, _, leaf = leaf.partition(".")
            if adapter not in active:
                continue
            name = f"{owner}.{leaf}"
        name = unwrapped(name).removeprefix(_PREFIX).replace(".base_layer.", ".")
        yield name, merged.get(id(tensor), tensor)


def _is_adapter(name: str, layers: dict[str, tuple[Any, Tensor]]) -> bool:
    """Whether a tensor belongs to an adapted layer, and not to the layer that it adapts."""
    parts = name.split(".")
    owners = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return any(owner in layers and not name.startswith(f"{owner}.base_layer.") for owner in owners)
