"""How much one receive asks of a GPU: operations, launches, and waits for what it has computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from deltasync import Policy
from deltasync.delta.batched.staging import BatchedStaging
from deltasync.delta.batched.weights import Numbers
from deltasync.delta.bucket import BucketReader, ReadBucket
from tests.delta.test_batched import Ends, mutate, placed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")

_VIEWS = ("detach", "select", "slice", "unbind", "view")
_ON_HOST = tuple(f"aten.{name}." for name in ("empty", *_VIEWS))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations, without views and memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not str(func).startswith(_ON_HOST):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counting(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of kernels by name, and "waits", from now on."""
    now: Counter[str] = Counter()
    run, read = InterpretedFunction.run, Numbers.read

    def launched(self: Any, *args: Any, **options: Any) -> None:
        now[self.fn.__name__] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            run(self, *args, **options)

    def waited(self: Numbers) -> Any:
        now["waits"] += 1
        return read(self)

    monkeypatch.setattr(InterpretedFunction, "run", launched)
    monkeypatch.setattr(Numbers, "read", waited)
    return now


def counted(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, buckets: list[ReadBucket]
) -> dict[str, Counter[str]]:
    """By step of a receive: operations of torch, launches of kernels, and "waits"."""
    now = counting(monkeypatch)
    found: dict[str, Counter[str]] = {}

    def step(name: str, call: Any) -> Any:
        now.clear()
        with Operations() as operations:
            made = call()
        found[name] = now + operations.counts
        return made

    staging = step("begin", lambda: BatchedStaging(ends.weights, ends.ledger))
    for bucket in buckets:
        step("stage", lambda bucket=bucket: staging.stage_bucket(bucket))
    step("predict", lambda: staging.ledger.total)
    step("commit", staging.commit)
    return found


def ends() -> Ends:
    model = {f"w{number}": torch.zeros(8, 8, dtype=torch.bfloat16) for number in range(12)}
    return Ends(placed(model), placed(model), Policy(dense_above=1.0, chunk_numel=16), 16)


def test_a_receive_of_a_bucket_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ends()
    BatchedStaging(both.weights, both.ledger)  # what is made once is there now
    mutate(both.source, 0, 0.2)
    delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=1 << 20)
    (bucket,) = delta.buckets()
    payload = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    bucket.write(payload)
    opened = BucketReader(both.specs).open(payload, bucket.num_rows)
    found = counted(monkeypatch, both, [opened])
    assert {name: dict(counts) for name, counts in found.items()} == {
        "begin": {"aten.clone.default": 1},
        "stage": {"aten._to_copy.default": 1, "check": 1},  # on a GPU, a copy of the table too
        "predict": {"aten.clone.default": 1, "waits": 1},
        "commit": {"aten.clone.default": 1, "write": 1, "waits": 1},
    }


def test_a_sync_without_buckets_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ends()
    found = counted(monkeypatch, both, [])
    assert not found["predict"]
    assert not found["commit"]
    assert BatchedStaging(both.weights, both.ledger).commit() == both.ledger.total
