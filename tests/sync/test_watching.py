"""What a sender notices: densities by layer, parameters that never change, densities that jump."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deltasync import SenderOptions
from deltasync.delta.bits import as_bits
from tests.worlds.links import Fleet, Model, fleet


def tree(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module with parameters of zeros, by names with dots."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        here = root
        for part in path:
            if part not in dict(here.named_children()):
                here.add_module(part, nn.Module())
            here = here.get_submodule(part)
        here.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return root


def trained() -> nn.Module:
    """Some parameters that are trained, one that is not, and a buffer."""
    made = tree(dict.fromkeys(["stem", "alone", "idle", "frozen", *LAYERS], (4,)))
    made.get_parameter("frozen").requires_grad = False
    made.register_buffer("count", torch.zeros(2))
    return made


@contextmanager
def one(source: nn.Module, options: SenderOptions) -> Iterator[Fleet]:
    with fleet(source, options=options) as here:
        here.add(copy.deepcopy(source))
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        yield here


def warned(here: Fleet, *names: str) -> list[str]:
    """Warnings about parameters of a delta in which these change."""
    for name in names:
        here.source.get_parameter(name).data.view(-1)[:1] += 1
    return [w for w in here.sender.send_weights(timeout_s=5).warnings if "require grad" in w]


LAYERS = [f"layers.{n}.weight" for n in range(3)]
STEM, ALL = ["stem"], ["stem", "alone", "idle", *LAYERS]


@pytest.mark.promise(
    "What operators see",
    "Trained parameters that never change, and densities that jump, are warned of once.",
)
@pytest.mark.parametrize(
    ("limit", "changes", "expected"),
    [
        (
            3,
            [[*LAYERS, "stem"]] * 2 + [LAYERS] * 5,
            {
                2: "'alone', 'idle' require grad and have not changed in 3 deltas: ",
                4: "'stem' require grad",
            },
        ),
        (2, [[]] * 4 + [STEM] * 2, {5: "'alone', 'idle', 'layers.0.weight' and 2 more require"}),
        (None, [STEM] * 12, {}),
    ],
    ids=["named once", "not where nothing changes", "off"],
)
def test_trained_parameters_that_never_change_are_named_once(
    limit: int | None,
    changes: list[list[str]],
    expected: dict[int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with one(trained(), SenderOptions(warn_unchanged_syncs=limit)) as here:
        told: dict[int, str] = {}
        for number, names in enumerate(changes):
            if names == ["frozen"]:
                here.source.get_parameter("frozen").requires_grad = True
                continue
            for warning in warned(here, *names):
                told[number] = warning
    assert told.keys() == expected.keys()
    assert all(told[number].startswith(text) for number, text in expected.items())
    logged = [r.getMessage() for r in caplog.records if "require grad" in r.getMessage()]
    assert [line.partition(": ")[2] for line in logged] == list(told.values())
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.promise(
    "What operators see",
    "Trained parameters that never change, and densities that jump, are warned of once.",
)
@pytest.mark.parametrize(
    ("factor", "changed", "expected"),
    [
        (5, [100, 200, 10, 49, 51], [100, 51]),
        (5, [60, 70, 300, 301, 1000, 10, 60], [60, 301, 60]),
        (None, [1000], []),
    ],
    ids=["once for each jump", "a worse one while it persists", "off"],
)
def test_a_density_that_jumps_is_warned_of(
    factor: float | None, changed: list[int], expected: list[int]
) -> None:
    options = SenderOptions(warn_unchanged_syncs=None, warn_density_factor=factor)
    with one(Model({"w": torch.zeros(1000)}), options) as here:
        told: list[tuple[int, str]] = []
        for count in [10] * 8 + changed:
            here.source.get_parameter("w").data[:count] += 1
            told += [(count, w) for w in here.sender.send_weights(timeout_s=5).warnings]
    assert [count for count, _ in told] == expected
    for count, warning in told:
        assert warning.startswith(
            f"{count / 10:.3f}% of the elements changed, the median of the deltas before is 1.000%"
        )


BY_LAYER: dict[str, dict[str, tuple[int, ...]]] = {
    "model.layers.0": {"model.layers.0.mlp.a": (7,), "model.layers.0.b": (3, 5)},
    "model.layers.1": {"model.layers.1.a": (11,)},
    "experts.0": {"experts.0.1.w": (4,)},
    "model.embed": {"model.embed.weight": (2,)},
    "head": {"head": (2,)},
    "1": {"1.weight": (0,)},
}
SHAPES = {name: shape for layer in BY_LAYER.values() for name, shape in layer.items()}
CHANGES = st.dictionaries(st.sampled_from(sorted(SHAPES)), st.integers(0, 40), max_size=5)


def densities(counts: dict[str, int], kind: str) -> dict[str, float]:
    groups = BY_LAYER if kind == "layer" else {name: {name: SHAPES[name]} for name in SHAPES}
    return {
        group: sum(counts.get(name, 0) for name in shapes)
        / max(1, sum(torch.Size(shape).numel() for shape in shapes.values()))
        for group, shapes in groups.items()
    }


@settings(max_examples=6, deadline=None)
@given(
    history=st.lists(CHANGES, min_size=1, max_size=3),
    kind=st.sampled_from(["layer", "parameter"]),
    kernels=st.sampled_from(["torch", "triton"]),
)
def test_densities_are_those_of_what_changed(
    history: list[dict[str, int]],
    kind: Literal["layer", "parameter"],
    kernels: Literal["torch", "triton"],
) -> None:
    source = tree(SHAPES)
    options = SenderOptions(report_density=kind, kernels=kernels)
    with one(source, options) as here:
        for changes in history:
            counts = {}
            for name, count in changes.items():
                bits = as_bits(source.get_parameter(name).data).view(-1)[:count]
                bits ^= 1
                counts[name] = len(bits)
            stats = here.sender.send_weights(timeout_s=5)
            assert stats.density_by == pytest.approx(densities(counts, kind))
