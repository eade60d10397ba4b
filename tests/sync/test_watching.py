"""What a sender notices: parameters that change, that never do, and densities that jump."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from deltasync import SenderOptions
from deltasync.delta.choice import Kernels
from deltasync.store.copied import CopiedTarget
from deltasync.sync import stats
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import Fleet, Model, fleet
from tests.worlds.trainers import rows_of, trainer_of

__all__ = ["one_kernel_at_a_time"]  # pytest uses it


def trained() -> nn.Module:
    """Some parameters that are trained, one that is not, and a buffer."""
    made = nn.ParameterDict({name: torch.zeros(4) for name in (*"abcde", "frozen")})
    made["frozen"].requires_grad = False
    made.register_buffer("count", torch.zeros(2))
    return made


@contextmanager
def one(source: nn.Module, options: SenderOptions) -> Iterator[Fleet]:
    with fleet(source, options=options) as here:
        here.join(copy.deepcopy(source))
        yield here


@pytest.mark.promise(
    "What operators see",
    "Trained parameters that never change, and densities that jump, are warned of once.",
)
def test_trained_parameters_that_never_change_are_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "_LIMIT", 3)
    told: dict[int, str] = {}
    with one(trained(), SenderOptions()) as here:
        for number, names in enumerate(["abc", "abc", "ab", "ab", "ab", "ab"]):
            for name in names:
                here.source.get_parameter(name).data[0] += 1
            for warning in here.sender.send_weights(timeout_s=60).warnings:
                told[number] = warning
                assert warning in caplog.text
    assert told.keys() == {2, 4}
    assert told[2].startswith("'d', 'e' require grad and have not changed in 3 deltas: ")
    assert told[4].startswith("'c' require grad")


def test_parameters_that_were_frozen_have_as_many_deltas_as_others_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "_LIMIT", 3)
    told: dict[int, str] = {}
    with one(trained(), SenderOptions()) as here:
        for number in range(1, 10):
            here.source.get_parameter("frozen").requires_grad_(number >= 3)
            for name in "abcde":
                here.source.get_parameter(name).data[0] += 1
            for warning in here.sender.send_weights(timeout_s=60).warnings:
                told[number] = warning
    assert list(told) == [6]
    assert told[6].startswith("'frozen' require grad and have not changed in 3 deltas: ")


@pytest.mark.promise(
    "What operators see",
    "Trained parameters that never change, and densities that jump, are warned of once.",
)
def test_a_density_that_jumps_is_warned_of_once_and_again_when_it_is_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "_FACTOR", 5)
    told: list[int] = []
    with one(Model({"w": torch.zeros(1000)}), SenderOptions()) as here:
        for count in [10] * 8 + [60, 70, 300, 301, 1000, 10, 60]:
            here.source.get_parameter("w").data[:count] += 1
            told += [count] * len(here.sender.send_weights(timeout_s=60).warnings)
    assert told == [60, 301, 60]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_parameters_that_changed_are_counted(kernels: Kernels) -> None:
    layers = [nn.ParameterDict({"a": torch.zeros(7), "b": torch.zeros(4)})]
    layers.append(nn.ParameterDict({"a": torch.zeros(3)}))
    source = nn.Module()
    source.layers, source.head = nn.ModuleList(layers), nn.Parameter(torch.zeros(2))
    with one(source, SenderOptions(kernels=kernels)) as here:
        for name, count in {"layers.0.a": 2, "layers.0.b": 3, "head": 1}.items():
            source.get_parameter(name).data[:count] += 1
        sent = here.sender.send_weights(timeout_s=60)
        assert sent.nnz == 6
        assert sent.changed == 3


def test_trainers_of_several_ranks_are_watched_by_what_all_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "_LIMIT", 3)
    source = nn.ParameterDict({n: nn.Parameter(torch.zeros(8, 32)) for n in "ab"})
    told: list[str] = []
    with trainer_of(source, rows_of(source, 2)) as here:
        for rank in here.sources:
            for tensor in rank.held.values():
                tensor.requires_grad_()
        here.add(CopiedTarget())
        here.wait(1)
        assert here.send().kind == "full"
        for _ in range(4):
            with torch.no_grad():
                source["a"][-2:] += 1  # which the last rank holds
                here.step()
            sent = here.send()
            assert sent.changed == 1
            told += sent.warnings
    assert [warning.partition(" require")[0] for warning in told] == ["'b'"]
