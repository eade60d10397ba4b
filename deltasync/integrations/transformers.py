"""Hugging Face transformers models, as sources and as targets, under checkpoint names.

transformers keeps some weights in other shapes than its checkpoints: experts are stacked, gate and
up are fused. Engines use the checkpoint's names. Here every checkpoint tensor is a view of the
parameter that contains it, found by recording transformers' own conversion once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from deltasync.delta.modes import in_plain_mode, writable
from deltasync.delta.naming import is_wrapper, unwrapped
from deltasync.delta.region import Region
from deltasync.delta.shard import is_sharded
from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor, Recording, record
from deltasync.engines.routes.regions import ordered
from deltasync.engines.routes.route import Piece
from deltasync.errors import ConfigError
from deltasync.sync.module import ModuleSource, named_tensors, renamed, tied_tensors
from deltasync.sync.source.tensors import NamedTensor


def unwrapped_module(module: object, *kinds: type[nn.Module], of: str) -> nn.Module:
    """The first of `kinds` inside what torch.compile or DDP makes of it. Raises ConfigError."""
    inside = module
    while not isinstance(inside, kinds):
        children = inside._modules if isinstance(inside, nn.Module) else {}
        inside = next((child for name, child in children.items() if is_wrapper(name)), None)
        if inside is None:
            raise ConfigError(
                f"{of} takes a {kinds[0].__name__}, and this is a {type(module).__name__}"
            )
    return inside


class TransformersSource(ModuleSource):
    """A transformers model's weights, with the names and shapes of its checkpoint.

    Args:
        model: The trainer's PreTrainedModel, or what torch.compile or DDP makes of one; read at
            every sync, never written. What such wrappers put into names is left out.
        rename: Maps a checkpoint name to the one that receivers know. If it returns None, the
            tensor is left out.

    Attributes:
        module: The PreTrainedModel.
    """

    def __init__(
        self, model: nn.Module, *, rename: Callable[[str], str | None] | None = None
    ) -> None:
        from transformers import PreTrainedModel

        super().__init__(
            unwrapped_module(model, PreTrainedModel, of="TransformersSource"), rename=rename
        )

    @in_plain_mode
    def _listed(self) -> list[NamedTensor]:
        """Raises ConfigError with the name of a tensor that transformers computes."""
        return tied_tensors(renamed(_views_of(self.module).items(), self._rename))


def transformers_target(model: nn.Module) -> RoutedTarget:
    """Return a transformers model as a target, with the names and shapes of its checkpoint.

    Args:
        model: The engine's model. It must keep its storage between syncs.
    """
    source = TransformersSource(model)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        views = {name: one.tensor for one in source.tensors() for name in one.names}
        for name, tensor in weights:
            views[name].copy_(tensor)

    checkpoint = [
        CheckpointTensor(one.name, tuple(one.tensor.shape), one.tensor.dtype, one.names[1:])
        for one in source.tensors()
    ]
    return RoutedTarget(model, checkpoint, load=load)


def _views_of(model: nn.Module) -> dict[str, Tensor]:
    """Raises ConfigError for checkpoint tensors that are not a view of one parameter."""
    tensors = tied_tensors(named_tensors(model))
    live = {unwrapped(name): one.tensor for one in tensors for name in one.names}
    parts, recording = _converted(model, live)
    refused = recording.refused | recording.uncovered
    views: dict[str, Tensor] = {}
    for name, pieces in recording.pieces.items():
        for piece in pieces:
            if piece.target.numel == parts[piece.live].numel():
                shape = parts[piece.live].shape
                view = _view(live[name], piece, shape, name=piece.live)
                views[piece.live] = view.requires_grad_(live[name].requires_grad)
    for name in parts.keys() - views.keys():
        refused.setdefault(name, "is made of several parameters")
    if refused:
        name, why = min(refused.items())
        raise ConfigError(
            f"{len(refused)} tensors are no views of parameters: {name!r} {why}; a ModuleSource "
            "sends parameters as they are, under the names that `rename` and `name_map` give them"
        )
    return {name: views[name] for name in parts}


def _converted(model: nn.Module, live: dict[str, Tensor]) -> tuple[dict[str, Tensor], Recording]:
    """A checkpoint's tensors without data, and the places that parameters take in them."""
    from transformers.core_model_loading import revert_weight_conversion

    def convert(state: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(model, state)
        return found

    def save(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in convert(dict(weights)).items():
            parts[name].copy_(tensor)

    metas = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in live.items()}
    # This memory is never touched: it gives each tensor an address, which meta tensors lack.
    parts = {
        n: torch.empty(t.shape, dtype=t.dtype, device="cpu") for n, t in convert(metas).items()
    }
    tensors = [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in live.items()]
    return parts, record(save, tensors, parts)


def _view(parameter: Tensor, piece: Piece, shape: torch.Size, *, name: str) -> Tensor:
    """The piece of a parameter as a tensor of this shape. Raises ConfigError."""
    target, source = ordered(piece.target, piece.source)
    if piece.source == Region.run(0, parameter.numel()) and parameter.shape == shape:
        return parameter.detach() if is_sharded(parameter) else writable(parameter)
    if is_sharded(parameter):
        raise ConfigError(
            f"{name!r} is a part of a sharded parameter: use a ModuleSource with a `name_map`"
        )
    flat = writable(parameter).view(-1)
    start = int(flat.storage_offset()) + source.start
    box = flat.as_strided(source.shape, source.strides, start)
    try:
        if target.is_run:
            return box.view(shape)
    except RuntimeError:
        pass  # its dimensions run through several of the parameter's
    raise ConfigError(
        f"{name!r} of shape {tuple(shape)} is no view of its parameter: use a ModuleSource with a "
        "`name_map`"
    )
