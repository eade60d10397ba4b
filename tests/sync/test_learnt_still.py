"""What an engine leaves as it was loaded is not numbered, and hides nothing that it computes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from deltasync.engines.proof.cold import with_room
from deltasync.errors import ConfigError
from tests.delta.lacks import LACKS
from tests.sync.test_learnt import Engine, Matrix, checkpoint
from tests.sync.test_learnt_attacks import reordered
from tests.sync.test_recomputed import check_is, fixed, followed, is_as, state_of, verified

Step = Callable[[Any], None]


class More(Matrix):
    """A matrix with more parameters, and work of its own.

    Attributes:
        likes: Of what shapes and dtypes they are, by name.
        step: The work.
    """

    likes: ClassVar[dict[str, Tensor]] = {}
    step: ClassVar[Step]

    def __init__(self) -> None:
        super().__init__()
        for name, like in self.likes.items():
            setattr(self, name, fixed(torch.empty_like(like)))

    def load(self, which: str, part: int, tensor: Tensor) -> None:
        if which in self.likes and which != "weight":
            self.get_parameter(which).data.copy_(tensor)
        else:
            super().load(which, part, tensor)

    def work(self) -> None:
        type(self).step(self)


def engine_of(step: Step, likes: dict[str, Tensor]) -> type[Engine]:
    made = type("Made", (More,), {"likes": likes, "step": staticmethod(step)})
    return type("Kind", (Engine,), {"made": made})


def given(seed: int, more: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint; weights are of the dtype of `weight` in `more`, if that is there."""
    found = checkpoint(seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in found.items():
        if "weight" in more and name.endswith("weight"):
            drawn = torch.randn(tensor.shape, generator=generator)
            found[name] = drawn.to(more["weight"].dtype)
    extra = {n: t for n, t in more.items() if n != "weight"}
    return found | {f"layers.{n}.0.{name}": one for n in range(3) for name, one in extra.items()}


def turned(matrix: Any) -> None:
    matrix.weight = fixed(matrix.weight.data.t().contiguous())


def maximum(matrix: Any) -> None:
    turned(matrix)
    both = torch.maximum(matrix.one.data, matrix.two.data)
    matrix.one, matrix.two = fixed(both), fixed(both.clone())


def exchanged(matrix: Any) -> None:
    turned(matrix)
    matrix.one, matrix.two = matrix.two, matrix.one


def copied(matrix: Any) -> None:
    turned(matrix)
    matrix.two.data.copy_(matrix.one.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("start", [(3, 5), (4, 4), (0, 0)])
@pytest.mark.parametrize("step", [maximum, exchanged, copied])
def test_two_tensors_that_are_alike(step: Step, start: tuple[int, int], dtype: torch.dtype) -> None:
    first, then = (
        {"one": torch.tensor([a]).to(dtype), "two": torch.tensor([b]).to(dtype)}
        for a, b in (start, (7, 2))
    )
    check(engine_of(step, first), given(0, first), given(1, then), may_refuse=False)


def twofold(matrix: Any) -> None:
    turned(matrix)
    matrix.scale = fixed((matrix.scale.data * matrix.whole.data).t().contiguous())


def twofold_above(matrix: Any) -> None:
    turned(matrix)
    scale = matrix.scale.data.t().contiguous()
    matrix.scale = fixed(scale / 2 if float(matrix.whole) > 100 else scale)


def without_nan(matrix: Any) -> None:
    turned(matrix)
    matrix.whole = fixed(matrix.whole.data.nan_to_num(1.0))


def without_zero(matrix: Any) -> None:
    turned(matrix)
    matrix.whole = fixed(torch.where(matrix.whole.data == 0, 1.0, matrix.whole.data))


@pytest.mark.parametrize(
    ("step", "value"),
    [
        (twofold, 1000.0),
        (twofold_above, 1000.0),
        (without_nan, float("nan")),
        (without_nan, float("inf")),
        (without_zero, 0.0),
    ],
)
def test_a_scale_of_the_whole_matrix(step: Step, value: float) -> None:
    first, then = ({"whole": torch.tensor([one])} for one in (0.7, value))
    check(engine_of(step, first), given(0, first), given(1, then), may_refuse=False)


def mapped(matrix: Any) -> None:
    turned(matrix)
    matrix.map.data[matrix.map.data == -1] = 0


def checked(matrix: Any) -> None:
    assert bool((matrix.map.data >= 0).all())
    turned(matrix)


@pytest.mark.parametrize(
    ("step", "values"),
    [
        (mapped, [0, 1, 2, -1]),
        (checked, [1]),
        (checked, [2, 3]),
        (checked, [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_that_stay(step: Step, values: list[int], dtype: torch.dtype) -> None:
    then = {"map": torch.tensor(values, dtype=dtype)}
    first = {"map": torch.full_like(then["map"], 5)}
    check(engine_of(step, first), given(0, first), given(1, then), may_refuse=False)


def loud(matrix: Any) -> None:
    """Weights are halved where a scale is large."""
    weight = matrix.weight.data.t().contiguous()
    matrix.weight = fixed(weight / 2 if bool(matrix.scale.data.max() > 100) else weight)


def choosy(matrix: Any) -> None:
    """Takes few scales, and clamps those."""
    if not bool(((matrix.scale.data > 0.01) & (matrix.scale.data < 100)).all()):
        raise RuntimeError("no such scales")
    turned(matrix)
    matrix.scale.data.clamp_(max=2.0)


def weights_without_nan(matrix: Any) -> None:
    matrix.weight.data.nan_to_num_(0.0)
    matrix.scale = fixed(matrix.scale.data.t().contiguous())


@pytest.mark.parametrize(
    ("step", "scaled", "spoiled"),
    [(loud, 1000.0, ""), (choosy, 20.0, ""), (weights_without_nan, 1.0, "layers.1.0.weight")],
)
def test_large_tensors_are_right_or_refused(step: Step, scaled: float, spoiled: str) -> None:
    like = {"weight": torch.empty(16, 8, dtype=torch.bfloat16)}
    is_large = step is not choosy
    more = like if is_large else {}

    def positive(seed: int, scale: float) -> dict[str, Tensor]:
        found = given(seed, more)
        return {n: t.clamp(min=0.2) * scale if n.endswith("scale") else t for n, t in found.items()}

    then = positive(1, scaled)
    if spoiled:
        then[spoiled][0, 0] = float("nan")
    check(engine_of(step, more), positive(0, 1.0), then, may_refuse=True)


def check(
    kind: type[Engine],
    first: dict[str, Tensor],
    then: dict[str, Tensor],
    *,
    may_refuse: bool,
) -> None:
    """The engine is started on `first` and follows `then`, or refuses and is as it was."""
    engine = kind.started(first)
    before = state_of(engine)
    try:
        with followed(engine, first) as (here, source, _):
            source.take(then)
            here.sender.send_weights()
            check_is(engine, then, before)
    except ConfigError:
        assert may_refuse
        assert is_as(engine, before)


class Lacking:
    """Work that finds no memory at a call, and at all after it if `forever`."""

    def __init__(self, lack: Exception) -> None:
        self.lack, self.calls, self.at, self.forever = lack, 0, 0, False

    def __call__(self, matrix: Any) -> None:
        self.calls += 1
        if self.at and (self.calls == self.at or (self.forever and self.calls > self.at)):
            raise self.lack
        turned(matrix)
        # Of large scales alone: no proof with the engine's own would find it.
        matrix.limit = fixed(matrix.scale.data.max().clamp(min=1000.0))


@pytest.mark.parametrize("lack", LACKS, ids=type)
@pytest.mark.parametrize("forever", [False, True])
def test_without_memory_an_engine_is_refused_and_stays_as_it_was(
    forever: bool, lack: Exception
) -> None:
    work, now = Lacking(lack), reordered(checkpoint(0), 0.5)
    kind = engine_of(work, {})
    engine = kind.started(now)
    started = work.calls
    verified(engine, now)
    total = work.calls - started
    assert total > 20
    for at in range(1, total + 1, 2):
        engine = kind.started(now)
        before = state_of(engine)
        work.calls, work.at, work.forever = 0, at, forever
        try:
            target = verified(engine, now)
        except ConfigError:
            continue
        finally:
            work.at = 0
            assert is_as(engine, before)
        assert not forever
        assert target._recomputed._units


@pytest.mark.parametrize("lack", LACKS, ids=type)
def test_what_a_try_without_room_held_is_free_when_the_host_tries(lack: Exception) -> None:
    held: list[weakref.ref[Tensor]] = []

    def work(device: torch.device) -> str:
        gc.collect()
        assert not [one for one in held if one() is not None]
        here = torch.zeros(1000)
        held.append(weakref.ref(here))
        if device.type != "cpu":
            raise type(lack)(str(lack))
        return "done"

    assert with_room(torch.device("meta"), work) == "done"
    assert len(held) == 2


@pytest.mark.parametrize("lack", LACKS, ids=type)
def test_no_room_anywhere_is_a_config_error(lack: Exception) -> None:
    def work(device: torch.device) -> None:
        raise lack

    with pytest.raises(ConfigError, match="leave it more"):
        with_room(torch.device("meta"), work)
