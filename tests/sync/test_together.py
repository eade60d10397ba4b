"""Loaders that need some tensors in one call get them in one call, whichever buckets bring them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ReceiverOptions, SenderOptions
from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor, record
from tests.worlds.links import Model, bits_equal, fleet, random_model, step

COUNT = 90  # tensors beside those that are loaded in pairs
SHAPES = (
    {"a0": (8, 4), "a1": (8, 4)}
    | {f"w{n}": (5, 4) for n in range(COUNT)}
    | {"b1": (4, 4), "b0": (4, 4), "c": (3,)}
)
CHECKPOINT = [CheckpointTensor(name, shape, torch.bfloat16) for name, shape in SHAPES.items()]
PAIRS = {"a0": "ab0", "b0": "ab0", "a1": "ab1", "b1": "ab1"}


class Engine(nn.Module):
    """Keeps a0 and b0 in one matrix, and a1 and b1 in another.

    Attributes:
        calls: The names of tensors with data that each call brought.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        for name in ("ab0", "ab1"):
            self._add(name, (12, 4))
        for name, shape in SHAPES.items():
            if name not in PAIRS:
                self._add(name, shape)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        zeros = torch.zeros(shape, dtype=torch.bfloat16)
        self.register_parameter(name, nn.Parameter(zeros, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.append([])
        waiting: dict[str, Tensor] = {}
        for name, tensor in self.ordered(weights):
            if not tensor.is_meta:
                self.calls[-1].append(name)
            if name in PAIRS:
                waiting[name] = tensor
                self.pair(name, waiting)
            else:
                self.get_parameter(name).data.copy_(tensor)

    def ordered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return weights

    def pair(self, name: str, waiting: dict[str, Tensor]) -> None:
        """Write both when both have come in this call."""
        both = [own for own, fused in PAIRS.items() if fused == PAIRS[name]]
        if all(own in waiting for own in both):
            fused = torch.cat([waiting.pop(own) for own in both])
            self.get_parameter(PAIRS[name]).data.copy_(fused)


class Separate(Engine):
    """Waits for both, and writes one after the other."""

    def pair(self, name: str, waiting: dict[str, Tensor]) -> None:
        both = [own for own, fused in PAIRS.items() if fused == PAIRS[name]]
        if all(own in waiting for own in both):
            live = self.get_parameter(PAIRS[name]).data
            live[:8].copy_(waiting.pop(both[0]))
            live[8:].copy_(waiting.pop(both[1]))


class Second(Separate):
    """Writes the second only if the first has been there in the same call, and before it."""

    def pair(self, name: str, waiting: dict[str, Tensor]) -> None:
        live = self.get_parameter(PAIRS[name]).data
        if name.startswith("a"):
            live[:8].copy_(waiting[name])
        elif name.replace("b", "a") in waiting:
            live[8:].copy_(waiting[name])


class ReadingAhead(Engine):
    """Goes through all names before it loads anything."""

    def ordered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return list(weights)


class OneAhead(Engine):
    """Has always asked for the next one already."""

    def ordered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        before = None
        for entry in weights:
            if before is not None:
                yield before
            before = entry
        if before is not None:
            yield before


class SeparateReadingAhead(ReadingAhead, Separate):
    pass


KINDS = [Engine, Separate, ReadingAhead, OneAhead, SeparateReadingAhead, Second]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loader_needs_in_one_call_is_known(kind: type[Engine]) -> None:
    engine = kind()
    live = dict(engine.named_parameters())
    groups = record(engine.load_weights, CHECKPOINT, live).together
    if kind is SeparateReadingAhead:  # nothing tells these pairs apart
        assert groups == (("a0", "a1", "b1", "b0"),)
    else:
        assert sorted(groups) == [("a0", "b0"), ("a1", "b1")]


@pytest.mark.promise(
    "Cost",
    "A full sync through a loader buffers one parameter, and what the loader needs in one call.",
)
@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    bucket_bytes=st.sampled_from([300, 1000, 1 << 20]),
    share=st.sampled_from([0.05, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_full_sync_gives_them_together(
    kind: type[Engine], bucket_bytes: int, share: float, seed: int
) -> None:
    source, engine = random_model(SHAPES, seed), kind()
    with fleet(source, options=SenderOptions(bucket_bytes=bucket_bytes)) as here:
        options = ReceiverOptions(stall_timeout_s=5)
        here.add(RoutedTarget(engine, CHECKPOINT), options=options)
        here.wait(1)
        stats = here.sender.send_weights()
        assert (stats.full_synced, stats.receivers) == (1, 1)
        assert bits_equal(engine, loaded(kind, source))
        step(source, torch.Generator().manual_seed(seed), share)
        assert here.sender.send_weights().kind == "delta"
        assert bits_equal(engine, loaded(kind, source))
    given_names = [name for call in engine.calls for name in call]
    assert sorted(given_names) == sorted(SHAPES)  # each once


def loaded(kind: type[Engine], source: Model) -> Engine:
    engine = kind()
    engine.load_weights([(n, w.data.bfloat16()) for n, w in source.named_parameters()])
    return engine
