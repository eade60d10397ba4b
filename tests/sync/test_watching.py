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

from deltasync import SenderOptions, SyncStats
from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError
from deltasync.sync.stats import layer_of
from tests.sync.test_group import change, model
from tests.worlds.links import Fleet, Model, fleet
from tests.worlds.trainers import rows_of, trainer_of


class Trained(nn.Module):
    """Some parameters that are trained, one that is not, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        names = ("stem", "alone", "idle")
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(8)))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))


@contextmanager
def one(source: nn.Module, options: SenderOptions) -> Iterator[Fleet]:
    with fleet(source, options=options) as here:
        here.add(copy.deepcopy(source))
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        yield here


def send(here: Fleet, *names: str) -> SyncStats:
    """A delta in which these parameters change."""
    for name in names:
        here.source.get_parameter(name).data.view(-1)[:1] += 1
    return here.sender.send_weights(timeout_s=5)


@pytest.mark.promise(
    "What operators see",
    "Trained parameters that never change, and densities that jump, are warned of once.",
)
def test_trained_parameters_that_never_change_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with one(Trained(), SenderOptions(warn_unchanged_syncs=3)) as here:
        changing = [f"layers.{n}.weight" for n in range(3)]
        told = [send(here, *changing, "stem").warnings for _ in range(2)]
        told += [send(here, *changing).warnings for _ in range(5)]
    assert [len(warnings) for warnings in told] == [0, 0, 1, 0, 1, 0, 0]
    assert told[2][0].startswith("'alone', 'idle' require grad and have not changed in 3 deltas: ")
    assert told[4][0].startswith("'stem' require grad")
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert logged == [f"v4: {told[2][0]}", f"v6: {told[4][0]}"]


def test_parameters_are_watched_from_when_they_are_trained() -> None:
    with one(Trained(), SenderOptions(warn_unchanged_syncs=3)) as here:
        changing = [f"layers.{n}.weight" for n in range(3)] + ["alone", "idle", "stem"]
        assert [send(here, *changing).warnings for _ in range(6)] == [()] * 6
        here.source.get_parameter("frozen").requires_grad = True
        told = [send(here, *changing).warnings for _ in range(4)]
    assert [len(warnings) for warnings in told] == [0, 0, 1, 0]
    assert told[2][0].startswith("'frozen' require grad and have not changed in 3 deltas: ")


def test_few_of_many_are_named() -> None:
    source = nn.ParameterDict({f"p{n}": nn.Parameter(torch.zeros(2)) for n in range(9)})
    with fleet(source, options=SenderOptions(warn_unchanged_syncs=1)) as here:
        here.add(nn.ParameterDict({n: nn.Parameter(p.clone()) for n, p in source.items()}))
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        (warning,) = send(here, "p0").warnings
    assert warning.startswith("'p1', 'p2', 'p3' and 5 more require grad")


def test_syncs_in_which_nothing_changes_count_for_no_single_parameter() -> None:
    with one(Trained(), SenderOptions(warn_unchanged_syncs=2)) as here:
        assert not any("require grad" in w for _ in range(4) for w in send(here).warnings)
        assert send(here, "stem").warnings == ()
        assert len(send(here, "stem").warnings) == 1


@pytest.mark.promise(
    "What operators see",
    "Trained parameters that never change, and densities that jump, are warned of once.",
)
def test_a_density_that_jumps_is_warned_of_once_for_each_jump() -> None:
    options = SenderOptions(warn_unchanged_syncs=None, warn_density_factor=5)
    with one(Model({"w": torch.zeros(1000)}), options) as here:
        weights = here.source.get_parameter("w").data

        def sent(count: int) -> tuple[str, ...]:
            weights[:count] += 1
            return here.sender.send_weights(timeout_s=5).warnings

        assert [sent(10) for _ in range(8)] == [()] * 8
        (warning,) = sent(100)
        assert warning.startswith(
            "10.000% of the elements changed, the median of the deltas before is 1.000%: check"
        )
        assert [sent(200), sent(10), sent(49)] == [()] * 3
        assert len(sent(51)) == 1


def test_a_worse_jump_is_warned_of_during_one_that_persists() -> None:
    options = SenderOptions(warn_unchanged_syncs=None, warn_density_factor=5)
    with one(Model({"w": torch.zeros(1000)}), options) as here:
        weights, told = here.source.get_parameter("w").data, []
        for count in [10] * 8 + [60, 70, 300, 301, 1000, 10, 60]:
            weights[:count] += 1
            if here.sender.send_weights(timeout_s=5).warnings:
                told.append(count)
    assert told == [60, 301, 60]


def test_warnings_can_be_turned_off() -> None:
    options = SenderOptions(warn_unchanged_syncs=None, warn_density_factor=None)
    with one(Trained(), options) as here:
        assert [send(here, "stem").warnings for _ in range(12)] == [()] * 12
        with torch.no_grad():
            for parameter in here.source.parameters():
                parameter += 1
        assert send(here).warnings == ()


@pytest.mark.parametrize("bad", [{"warn_unchanged_syncs": 0}, {"warn_density_factor": 1.0}])
def test_bad_limits_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SenderOptions(**bad)  # type: ignore[arg-type]


def test_other_weights_are_watched_anew() -> None:
    """A source that starts over keeps no count of another model's parameters."""
    source = Trained()
    with one(source, SenderOptions(warn_unchanged_syncs=2)) as here:
        send(here, "stem")
        here.serving["engine/0"].stop()
        here.add(Trained(), engine="other")
        here.wait(1)
        stats = send(here, "stem")
        assert stats.warnings == () or stats.kind == "delta"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("experts.0.1.w", "experts.0"),
        ("model.embed.weight", "model.embed"),
        ("weight", "weight"),
        ("0.weight", "0"),
    ],
)
def test_layers_are_names_up_to_the_first_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.a": (7,),
    "layers.0.b": (3, 5),
    "layers.1.a": (11,),
    "head": (2,),
    "none": (0,),
}
CHANGES = st.dictionaries(st.sampled_from(sorted(SHAPES)), st.integers(0, 40), max_size=5)


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


def densities(counts: dict[str, int], kind: str) -> dict[str, float]:
    numels = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    groups: dict[str, list[str]] = {}
    for name in SHAPES:
        groups.setdefault(layer_of(name) if kind == "layer" else name, []).append(name)
    return {
        group: sum(counts.get(name, 0) for name in names)
        / max(1, sum(numels[name] for name in names))
        for group, names in groups.items()
    }


@settings(max_examples=25, deadline=None)
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


def test_densities_of_sharded_trainers_are_those_of_all_ranks() -> None:
    source, target = model(1), model(2)
    options = SenderOptions(report_density="parameter")
    with trainer_of(source, rows_of(source, 2), options=options) as here:
        here.add(target)
        here.wait(1)
        assert here.send().density_by == {}
        before = {name: p.detach().clone() for name, p in source.named_parameters()}
        change(here, 0)
        stats = here.send()
        for name, parameter in source.named_parameters():
            differs = as_bits(parameter.data) != as_bits(before[name])
            share = differs.sum().item() / max(1, parameter.numel())
            assert stats.density_by[name] == pytest.approx(share), name
