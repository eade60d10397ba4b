"""What an engine quantizes, read from the quantized checkpoint that it was started on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.files.checkpoint import Checkpoint
from deltasync.quant.config import form_of_layer, forms_of_targets
from deltasync.quant.form import Form
from deltasync.quant.served import Forms
from deltasync.wire.messages import ParameterSpec

_CONSTANTS = {"input_scale", "input_global_scale", "k_scale", "v_scale"}
_PLAIN = {"weight", "bias", *_CONSTANTS}
_QUANTIZED = {
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_shape"),
    *("weight_global_scale", "weight_zero_point", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx"),
}
_CONFIGS = ("config.json", "hf_quant_config.json")


def forms_of_checkpoint(path: str | Path, *, config: Mapping[str, object] | None = None) -> Forms:
    """Return the forms of what an engine serves that was started on this checkpoint.

    Headers alone say which tensors are quantized; the config says by which arithmetic. No other
    bytes are read.

    Args:
        path: The folder: safetensors files, with config.json or hf_quant_config.json.
        config: The `quantization_config`, instead of the folder's.

    Raises:
        ConfigError: The folder is no quantized checkpoint, the config is unknown, or a layer has
            parts that no form has. The forms raise it for a tensor whose parts in the checkpoint
            have other shapes or dtypes, and for one that fuses or stacks quantized ones.
    """
    path = Path(path)
    groups = forms_of_targets(_config_of(path) if config is None else config)
    layers: dict[str, dict[str, ParameterSpec]] = defaultdict(dict)
    for name, spec in Checkpoint(path).specs.items():
        layer, _, part = name.rpartition(".")
        layers[layer][part] = spec
    quantized = {
        layer: _Layer(layer, parts, _form_of(groups, layer))
        for layer, parts in layers.items()
        if _is_quantized(parts)
    }
    if not quantized:
        raise ConfigError(
            f"{path}: no tensor is quantized; give the checkpoint that the engine serves, or a "
            "function of your own as forms"
        )
    return _CheckpointForms(quantized, frozenset(layers))


def constants_of_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the scales of activations that a checkpoint holds: `constants` of a `ServedSource`.

    Raises ConfigError as `Checkpoint` does.
    """
    checkpoint = Checkpoint(path)
    return {
        name: checkpoint.tensor(name).clone()
        for name in checkpoint.specs
        if name.rpartition(".")[2] in _CONSTANTS
    }


@dataclass(frozen=True)
class _Layer:
    """A layer that the engine holds quantized."""

    name: str
    parts: Mapping[str, ParameterSpec]
    form: Form

    def __post_init__(self) -> None:
        """Raises ConfigError for parts that the form does not have, of whatever shape."""
        known = _PLAIN | set(self.form.parts((128, 128)))
        if unknown := sorted(set(self.parts) - known):
            raise ConfigError(
                f"{self.name}.{unknown[0]}: {self.form.name} has no such part; the checkpoint is "
                "quantized in another form than its config says"
            )

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ConfigError, by name, unless a matrix of this shape has these parts."""
        if len(shape) != 2:
            return  # the source refuses it
        rows, cols = shape
        for suffix, part in self.form.parts((rows, cols)).items():
            spec = self.parts.get(suffix)
            if part.elements is not None and spec is not None and spec.shape == part.shape:
                continue  # files have int32 or int64, and engines int64
            held = "nothing" if spec is None else f"{spec.dtype.name} {list(spec.shape)}"
            made = f"{part.dtype.name} {list(part.shape)}"
            if held != made:
                raise ConfigError(
                    f"{self.name}.{suffix}: the engine's checkpoint has {held}, and the trainer's "
                    f"{list(shape)} as {self.form.name} {made}: one of the two is another model, "
                    "or is quantized otherwise"
                )


class _CheckpointForms:
    """See `forms_of_checkpoint`."""

    def __init__(self, quantized: Mapping[str, _Layer], layers: Collection[str]) -> None:
        self._quantized, self._layers = quantized, layers
        self._owners: dict[str, str] = {}  # of quantized layers, and of numbered stacks of them
        for layer in quantized:
            owner = layer.rpartition(".")[0]
            self._owners.setdefault(owner, layer)
            stack, _, number = owner.rpartition(".")
            if number.isdigit():
                self._owners.setdefault(stack, layer)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Form | None:
        layer = name.removesuffix(".weight")
        if layer in self._quantized and name != layer:
            self._quantized[layer].check(shape)
            return self._quantized[layer].form
        beside = self._owners.get(layer.rpartition(".")[0])
        if layer not in self._layers and len(shape) > 1 and beside is not None:
            raise ConfigError(
                f"{name}: the engine's checkpoint has no such tensor, and has {beside} quantized: "
                "give the tensors that the checkpoint has, see `name_map`"
            )
        return None


def _config_of(path: Path) -> Mapping[str, object]:
    """The folder's `quantization_config`. Raises ConfigError."""
    for file in (path / name for name in _CONFIGS):
        try:
            found = json.loads(file.read_bytes()) if file.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{file}: not a JSON object")
        own = found if "quantization" in found else found.get("quantization_config")
        if isinstance(own, dict):
            return own
    raise ConfigError(f"{path}: no quantization_config in {' or '.join(_CONFIGS)}; give `config`")


def _is_quantized(parts: Mapping[str, ParameterSpec]) -> bool:
    weight = parts.get("weight")
    return bool(_QUANTIZED & set(parts)) or (weight is not None and weight.dtype.item_size == 1)


def _form_of(groups: Mapping[str, Form], layer: str) -> Form:
    """Raises ConfigError if the config has no form for a layer."""
    form = form_of_layer(groups, layer) or groups.get("Linear")
    if form is None:
        raise ConfigError(f"{layer} is quantized, and is no target of the quantization_config")
    return form
