"""Weights that come one after another, and receivers that take whatever is sent.

`test_history.py` plays whole histories of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from deltasync import SenderOptions, TrainerGroup, WeightSender
from deltasync.dtypes import BY_NAME
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    SourceChanged,
    SyncAborted,
    TransportTimeout,
)
from deltasync.integrations.streamed import StreamedWeights
from deltasync.store.copied import CopiedTarget
from deltasync.sync.protocol.round import Owner
from deltasync.transports import inprocess
from deltasync.wire.messages import ParameterSpec
from tests.worlds.links import Fleet, fleet, random_model, until

Weights = dict[str, Tensor]
SHAPES = {"a": (40, 9), "b": (7,), "none": (0, 3), "scalar": (), "c": (300,)}


def weights_of(seed: int = 0) -> Weights:
    return {name: one.data for name, one in random_model(SHAPES, seed).named_parameters()}


def sync(here: Fleet, weights: Weights) -> None:
    here.source.take(weights.items())
    here.sender.send_weights(timeout_s=60)


def hold(tensors: dict[str, Tensor] | nn.ParameterDict, weights: Weights) -> bool:
    return tensors.keys() == weights.keys() and all(
        torch.equal(tensors[name], one.to(tensors[name].dtype)) for name, one in weights.items()
    )


def replica_of(dtype: torch.dtype) -> nn.ParameterDict:
    return nn.ParameterDict({n: torch.zeros(s, dtype=dtype) for n, s in SHAPES.items()})


class Choosing(Owner):
    names = frozenset({"kept", "other"})

    def admits(self, engine: str) -> bool:
        return engine in self.names


def test_engines_that_are_admitted_no_more_keep_their_weights() -> None:
    weights, kept, other, owner = weights_of(), CopiedTarget(), CopiedTarget(), Choosing()
    with fleet(StreamedWeights(), owner=owner) as here:
        here.source.take(weights.items())
        here.join({"kept": kept, "other": other})
        before = {name: tensor.clone() for name, tensor in other.tensors.items()}
        here.serving.pop("other/0").stop()
        owner.names = frozenset({"kept"})
        here.sender.let_go_of_strangers("")
        stranger = here.add(CopiedTarget(), engine="stranger")
        weights["a"] += 1
        sync(here, weights)
        with pytest.raises(TransportTimeout):
            here.sender.wait_for_receivers(2, timeout_s=0.2)
        until(lambda: bool(stranger.errors))
        assert "other engines" in str(stranger.errors[0])
        assert hold(dict(kept.tensors), weights)
        assert hold(dict(other.tensors), before)
        assert here.sender.engines == {"kept"}


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"a": torch.zeros(9, 40)}, "shape"),
        ({"new": torch.zeros(3)}, "'new' is new"),
        ({"a": torch.zeros(40, 9, dtype=torch.int32)}, "cannot be sent"),
    ],
)
def test_weights_of_another_model_are_refused_and_gone_through(
    other: Weights, problem: str
) -> None:
    stream, weights, seen = StreamedWeights(), weights_of(), list[str]()
    stream.take(weights.items())

    def exported(weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            seen.append(name)
            yield name, tensor

    with pytest.raises(DeltaSyncError, match=problem):
        stream.take(exported(weights | other))
    assert len(seen) == len(weights | other)
    with pytest.raises(SourceChanged, match="4 tensors did not come"):
        stream.take(exported({"b": weights["b"] + 1}))


def test_what_does_not_fit_a_stream_is_refused() -> None:
    stream, link = StreamedWeights(), inprocess.Sender()
    for weights, problem in (([], "no weights came"), ([("a", torch.ones(1))] * 2, "twice")):
        with pytest.raises(ConfigError, match=problem):
            stream.take(weights)
    with pytest.raises(ConfigError, match="options"):
        WeightSender(stream, link, options=SenderOptions())
    with pytest.raises(ConfigError, match="group"):
        WeightSender(stream, link, group=TrainerGroup(inprocess.Sender(), 2))


def test_masters_are_sent_in_the_dtypes_that_the_first_engine_holds() -> None:
    weights, replica = weights_of(), replica_of(torch.bfloat16)
    announced = [ParameterSpec((n,), shape, BY_NAME["float32"]) for n, shape in SHAPES.items()]
    with fleet(StreamedWeights(announced=announced)) as here:
        here.source.take(weights.items())
        here.join(replica)
        with pytest.raises(ConfigError, match="take them"):  # what was sent is not sent again
            here.sender.send_weights(timeout_s=60)
        for factor in (1.001, 3.0):
            for tensor in weights.values():
                tensor *= factor
            here.source.take(weights.items())
            stats = here.sender.send_weights(timeout_s=60)
            assert list(here.source.declared()) == announced  # in the trainer's own dtypes
            assert hold(replica, weights)
        assert stats.kind == "delta"
        here.serving.pop("engine/0").stop()
        until(lambda: here.sender.wait_for_receivers(0) or not here.sender.num_receivers)  # type: ignore[func-returns-value]
        here.source.take(weights.items())
        with pytest.raises(SyncAborted, match="other dtypes than earlier ones"):
            here.join({"other": replica_of(torch.float32)})
