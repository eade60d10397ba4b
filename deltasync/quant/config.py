"""What an engine quantizes, from the `quantization_config` of its checkpoint's config.json.

Which layers are left alone follows vLLM 0.32 (layers/quantization): for fp8 `is_layer_skipped` in
utils/quant_utils.py, for compressed-tensors `should_ignore_layer` and `find_matched_target` in
compressed_tensors/utils.py, for ModelOpt `is_layer_excluded` in modelopt.py. Where SGLang 0.5.23
does something else (`is_layer_skipped` in its layers/quantization/utils.py), a layer is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from deltasync.errors import ConfigError
from deltasync.quant.form import Form
from deltasync.quant.methods import CompressedTensors, Fp8, ModelOpt, engines_layer
from deltasync.quant.served import Forms

_METHODS: dict[str, type[Fp8 | CompressedTensors | ModelOpt]] = {
    "fp8": Fp8,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
}

_REGEX = "re:"
_LINEAR = re.compile(r".*_proj|kv_a_proj_with_mqa|w[123]|fc[12]|dense\w*|query_key_value")
_UNSURE = re.compile(r"in_proj\w*|weights_proj")  # engines keep some of these as they are
_TOWERS = {"visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector"}
_ROUTERS = {"gate", "router", "shared_expert_gate"}
_OTHERS = {
    *("embed_tokens", "word_embeddings", "embed_positions", "wte", "wpe", "tok_embeddings"),
    *("lm_head", "embed_out"),
}


def forms_of_config(
    config: Mapping[str, object], *, alone: Collection[str] = (), linear: Collection[str] = ()
) -> Forms:
    """Return the forms of what an engine serves that was started with this `quantization_config`.

    A config does not say which tensors are weights of linear layers. So names are looked at: those
    of linear layers, embeddings, heads and routers that vLLM's models share are known, and a matrix
    of another name is refused. If the engine's checkpoint is quantized itself,
    `deltasync.files.served.forms_of_checkpoint` needs no such knowledge.

    Args:
        config: As in config.json, or the whole of hf_quant_config.json.
        alone: Patterns (`fnmatch`) of tensors that the engine does not quantize.
        linear: Patterns of weights of linear layers whose names are not known.

    Raises:
        ConfigError: Of the config, something is unknown or cannot be matched bit for bit. The
            forms raise it for a tensor of which it is not known whether it is quantized.
    """
    if isinstance(alone, str) or isinstance(linear, str):
        raise ConfigError("alone and linear are lists of patterns, not one")
    groups, ignores = scheme_of(config)
    return _Forms(groups, ignores, tuple(alone), tuple(linear))


def scheme_of(
    config: Mapping[str, object],
) -> tuple[Mapping[str, Form], Callable[[str], bool]]:
    """The form of each target, and which layers are left alone. Raises ConfigError."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"quantization_config is a {type(config).__name__}, not a mapping")
    method = config.get("quant_method")
    if method is None and "quantization" in config:  # hf_quant_config.json says it nowhere
        method = "modelopt"
    if not isinstance(method, str) or method.lower() not in _METHODS:
        raise ConfigError(
            f"quantization_config: quant_method {method!r} has no served form; known are "
            f"{sorted(_METHODS)}; serve bfloat16, or reload the engine"
        )
    try:
        said: dict[str, Any] = {str(key): value for key, value in config.items()}
        told = _METHODS[method.lower()](**said)
        return told.forms(), told.ignores()
    except ConfigError as error:
        raise ConfigError(f"quantization_config: {error}") from None
    except re.error as error:
        raise ConfigError(f"quantization_config: {error.pattern!r}: {error}") from None


@dataclass(frozen=True)
class _Forms:
    """See `forms_of_config`."""

    groups: Mapping[str, Form]
    ignores: Callable[[str], bool]
    alone: tuple[str, ...]
    linear: tuple[str, ...]

    def __call__(self, name: str, shape: tuple[int, ...]) -> Form | None:
        layer, _, last = name.rpartition(".")
        is_stacked = len(shape) == 3 and "experts" in name.split(".")
        if _any_matches(self.alone, name) or not (is_stacked or len(shape) == 2):
            return None
        if last != "weight" and not is_stacked:
            return None
        if self.ignores(layer) or layer.split(".")[-1] in _ROUTERS:
            return None
        form, theirs = named_form(self.groups, layer), _engines_form(self.groups, layer)
        if (form or self.groups.get("Linear")) != (theirs or self.groups.get("Linear")):
            raise ConfigError(
                f"{layer}: its target in config_groups is not that of the layer of vLLM that has "
                "it; give all of q, k and v, of gate and up, and of a layer's experts one target"
            )
        if form is not None:
            return form
        if "Linear" not in self.groups:
            return None
        if is_stacked or _any_matches(self.linear, name) or _is_linear(name):
            return self.groups["Linear"]
        return None


def _engines_form(groups: Mapping[str, Form], layer: str) -> Form | None:
    """As `named_form`, for the layer of vLLM that a layer of the checkpoint is a part of."""
    fused, parts = engines_layer(layer)
    if (form := named_form(groups, fused)) is not None or not parts:
        return form
    forms = [named_form(groups, part) for part in parts]
    return forms[0] if None not in forms else None


def named_form(groups: Mapping[str, Form], layer: str) -> Form | None:
    """The form of the first target that is the layer's name, or a regular expression of it."""
    for target, form in groups.items():
        if target == layer:
            return form
        if target.startswith(_REGEX) and re.match(target.removeprefix(_REGEX), layer):
            return form
    return None


def _any_matches(patterns: Collection[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_linear(name: str) -> bool:
    """Whether it is a linear layer of a language model. Raises ConfigError if that is not known."""
    *owners, last, _ = name.split(".")
    if last in _OTHERS or "norm" in last:
        return False
    if _LINEAR.fullmatch(last) and not _UNSURE.fullmatch(last) and not _TOWERS.intersection(owners):
        return True
    raise ConfigError(
        f"{name}: whether the engine quantizes it cannot be told from its name; say so by `alone` "
        "or `linear`, or take the forms from the engine's checkpoint: forms_of_checkpoint"
    )
