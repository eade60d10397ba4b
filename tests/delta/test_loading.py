"""Full syncs through a loader: what is wrong with a bucket is found before it loads any of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, Run
from deltasync.delta.digests import DigestLedger
from deltasync.delta.shard import whole
from deltasync.errors import InvalidIndices, InvalidTable
from deltasync.sync.target.loading import Loading
from deltasync.wire.messages import ParameterSpec
from tests.worlds.payloads import stage_runs

I16, I32 = dtypes.BY_NAME["int16"], dtypes.BY_NAME["int32"]
SPECS = tuple(
    ParameterSpec((name,), (4,), dtype) for name, dtype in (("a", I16), ("b", I32), ("c", I16))
)


class Loaded:
    """A loader that takes down what it is given."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[list[int]] = []
        self.groups: Sequence[Sequence[str]] = ()

    def load(self, weights: Iterable[tuple[str, Tensor]], /) -> None:
        for name, tensor in weights:
            self.names.append(name)
            self.values.append(tensor.tolist())

    def together(self) -> Sequence[Sequence[str]]:
        return self.groups

    def finish(self) -> None:
        pass


def loading(loader: Loaded, said: list[bool]) -> Loading:
    """Of an engine that holds `a` and `b`, not `c`."""
    ledger = DigestLedger(whole(SPECS), chunk_numel=4)
    flats = {0: Flat.of(torch.zeros(4, dtype=torch.int16)), 1: Flat.of(torch.zeros(4).int())}
    return Loading(
        loader,
        flats,
        ledger,
        lambda chunks: np.zeros(len(chunks), np.uint64),
        writing=lambda: said.append(True),
    )


def ones(number: int, count: int) -> Tensor:
    return torch.ones(count, dtype=torch.int32 if number == 1 else torch.int16)


def dense(number: int) -> tuple[int, Run]:
    return number, Run(0, 4, None, ones(number, 4))


def unsorted(number: int) -> tuple[int, Run]:
    return number, Run(0, 4, torch.tensor([3, 2], dtype=torch.int32), ones(number, 2))


@pytest.mark.parametrize("bad", [1, 2], ids=["held", "of another rank"])
def test_bad_indices_are_found_before_anything_of_their_bucket_is_loaded(bad: int) -> None:
    loader, said = Loaded(), list[bool]()
    runs = [dense(0), unsorted(1)] if bad == 1 else [dense(0), dense(1), unsorted(2)]
    with pytest.raises(InvalidIndices, match=f"{SPECS[bad].name}: "):
        stage_runs(loading(loader, said), runs, SPECS)
    assert (loader.names, said) == ([], [])


@pytest.mark.parametrize(
    ("first", "again"), [("whole", "whole"), ("whole", "in part"), ("in part", "whole")]
)
def test_a_tensor_that_comes_twice_is_refused_before_it_is_loaded_again(
    first: str, again: str
) -> None:
    """Two ranks of a trainer send it: each connection alone is in order."""
    loader = Loaded()
    applier = loading(loader, [])
    part = 0, Run(1, 2, None, torch.ones(2, dtype=torch.int16))
    stage_runs(applier, [dense(0) if first == "whole" else part], SPECS)
    before = list(loader.names)
    with pytest.raises(InvalidTable, match="a: a full sync brings some of it twice"):
        stage_runs(applier, [dense(0) if again == "whole" else part], SPECS)
    assert loader.names == before


def test_what_waits_for_another_tensor_outlives_its_payload() -> None:
    loader = Loaded()
    loader.groups = (("a", "b"),)  # needed in one call
    applier = loading(loader, [])
    for number in (0, 1):  # each in a payload that is overwritten
        stage_runs(applier, [dense(number)], SPECS)
    assert loader.values == [[1] * 4, [1] * 4]
