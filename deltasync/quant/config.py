"""The forms that a `quantization_config` means, as an engine's checkpoint has it in config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from deltasync.delta.options import OptionsModel
from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8 as PlainFp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4

_REGEX = "re:"
_KV = (
    "the engine's cache has scales of its own: give the config without it, and those scales as "
    "`constants` of ServedSource"
)


class Fp8(OptionsModel):
    """DeepSeek's, and that of transformers: `quant_method` "fp8"."""

    quant_method: str
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[int, int] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    ignored_layers: list[str] | None = None
    modules_to_not_convert: list[str] | None = None
    modules_to_convert: None = None
    packed_modules_mapping: dict[str, list[str]] | None = None
    dequantize: Literal[False] = False

    def forms(self) -> Mapping[str, Form]:
        """The form of each target. Raises ConfigError for one that is not known."""
        if self.weight_block_size is None:
            raise ConfigError(
                "there is no weight_block_size: FP8 then has one scale for a matrix; the config "
                "does not say by whose arithmetic; engines round the codes of fused layers again; "
                'serve FP8 in blocks, or "float-quantized" of compressed-tensors'
            )
        if self.weight_block_size != (128, 128):
            raise ConfigError(f"weight_block_size {self.weight_block_size} has no served form")
        return {"Linear": BlockFp8("ue8m0" if self.scale_fmt == "ue8m0" else "float32")}


class Arguments(OptionsModel):
    """How one kind of tensor is quantized: `QuantizationArgs` of compressed-tensors."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | Literal["local"] = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None


class Group(OptionsModel):
    """One of the `config_groups` of compressed-tensors."""

    targets: list[str]
    weights: Arguments
    input_activations: Arguments | None = None
    output_activations: None = None
    format: str | None = None


class CompressedTensors(OptionsModel):
    """`quant_method` "compressed-tensors"."""

    quant_method: str
    config_groups: dict[str, Group] = Field(min_length=1)
    format: str | None = None
    ignore: list[str] = Field(default_factory=list)
    kv_cache_scheme: object = None
    sparsity_config: object = None
    transform_config: object = None
    quantization_status: Literal["compressed", "frozen"] = "compressed"
    global_compression_ratio: float | None = None
    version: str | None = None

    def forms(self) -> Mapping[str, Form]:
        """The form of each target. Raises ConfigError for one that is not known."""
        if self.kv_cache_scheme:
            raise ConfigError(f"kv_cache_scheme: {_KV}")
        for name in ("sparsity_config", "transform_config"):
            if getattr(self, name):
                raise ConfigError(f"{name}: weights that are changed so have no served form")
        found: dict[str, Form] = {}
        for name, group in self.config_groups.items():
            for target in group.targets:
                if not (target == "Linear" or "." in target or target.startswith(_REGEX)):
                    raise ConfigError(f"{name}: layers of class {target!r} have no served form")
                try:
                    found[target] = _form_of(group.weights, group.format or self.format)
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}") from None
        return found


def _form_of(weights: Arguments, kind: str | None) -> Form:
    """The form of a group. Raises ConfigError for one that is not known."""
    scale = None if weights.scale_dtype is None else weights.scale_dtype.removeprefix("torch.")
    is_static = weights.symmetric and not weights.dynamic and not weights.actorder
    key = kind if is_static else None, weights.type, weights.num_bits, weights.strategy
    match (*key, weights.group_size, scale):
        case ("pack-quantized", "int", 4, "group", int(columns), None | "bfloat16") if columns > 0:
            return Int4(columns)
        case ("pack-quantized", "int", 4, "channel", _, None | "bfloat16"):
            return Int4(None)
        case ("nvfp4-pack-quantized", "float", 4, "tensor_group", 16, None | "float8_e4m3fn"):
            return CompressedNvfp4()
        case ("mxfp8-quantized", "float", 8, "group", 32, "uint8"):
            return MxFp8()
        case ("float-quantized", "float", 8, "channel", _, None | "bfloat16"):
            return PlainFp8("channel")
        case ("float-quantized", "float", 8, "tensor", _, None | "bfloat16"):
            return PlainFp8("tensor")
        case ("float-quantized", "float", 8, "block", _, None | "bfloat16"):
            if weights.block_structure in ([128, 128], "128x128"):
                return BlockFp8("bfloat16")
        case ("int-quantized", "int", 8, "channel", _, None | "bfloat16"):
            return Int8()
    settings = weights.model_dump(
        exclude_none=True, exclude={"observer", "observer_kwargs", "zp_dtype"}
    )
    raise ConfigError(f"format {kind!r} with weights {settings} has no served form")


class ModelOpt(OptionsModel):
    """`quant_method` "modelopt", or what hf_quant_config.json has under "quantization"."""

    quant_method: str = "modelopt"
    quant_algo: str = ""
    group_size: int | None = None
    ignore: list[str] = Field(default_factory=list)
    exclude_modules: list[str] = Field(default_factory=list)
    config_groups: object = None
    producer: object = None
    kv_cache_scheme: object = None
    kv_cache_quant_algo: str | None = None
    has_zero_point: Literal[False] = False
    pre_quant_scale: Literal[False] = False

    def forms(self) -> Mapping[str, Form]:
        """The form of each target. Raises ConfigError for one that is not known."""
        if self.kv_cache_quant_algo or self.kv_cache_scheme:
            raise ConfigError(f"kv_cache_quant_algo: {_KV}")
        if self.quant_algo.upper() in ("NVFP4", "W4A16_NVFP4") and self.group_size in (None, 16):
            return {"Linear": ModelOptNvfp4()}
        raise ConfigError(
            f"quant_algo {self.quant_algo!r}, group_size {self.group_size}: no served form"
        )


_METHODS: dict[str, type[Fp8 | CompressedTensors | ModelOpt]] = {
    "fp8": Fp8,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
}


def forms_of_targets(config: Mapping[str, object]) -> Mapping[str, Form]:
    """Return the form of each target of a `quantization_config`.

    Args:
        config: As in config.json, or the whole of hf_quant_config.json.

    Raises:
        ConfigError: Of the config, something is unknown or cannot be matched bit for bit.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"quantization_config is a {type(config).__name__}, not a mapping")
    if isinstance(inner := config.get("quantization"), Mapping):  # of hf_quant_config.json
        config = {"quant_method": "modelopt", **inner}
    method = config.get("quant_method")
    if not isinstance(method, str) or method.lower() not in _METHODS:
        raise ConfigError(
            f"quantization_config: quant_method {method!r} has no served form; known are "
            f"{sorted(_METHODS)}; serve bfloat16, or reload the engine"
        )
    try:
        settings: dict[str, Any] = {str(key): value for key, value in config.items()}
        return _METHODS[method.lower()](**settings).forms()
    except ConfigError as error:
        raise ConfigError(f"quantization_config: {error}") from None
    except re.error as error:
        raise ConfigError(f"quantization_config: {error.pattern!r}: {error}") from None


def form_of_layer(forms: Mapping[str, Form], layer: str) -> Form | None:
    """The form of the first target that is the layer's name, or a regular expression of it."""
    for target, form in forms.items():
        if target == layer:
            return form
        if target.startswith(_REGEX) and re.match(target.removeprefix(_REGEX), layer):
            return form
    return None
