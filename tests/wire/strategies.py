"""Hypothesis strategies of messages, layouts, runs and patch tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync import dtypes
from deltasync.delta.bits import Run, integer_dtype
from deltasync.delta.digests import digest_text
from deltasync.wire import messages as m
from deltasync.wire.messages import ParameterSpec

Draw = Callable[[st.SearchStrategy[Any]], Any]
Uint64s = NDArray[np.uint64]

# Lone surrogates are no Unicode text and have no UTF-8.
characters = st.characters(exclude_categories=["Cs"])
names = st.text(characters, min_size=1, max_size=12)
engines = st.lists(names, max_size=3).map(tuple)
counts = st.integers(0, 2**63 - 1)
versions = st.integers(0, 2**53 - 1)
digests = st.integers(0, 2**64 - 1).map(digest_text)
connections = st.binary(min_size=16, max_size=16).map(bytes.hex)
texts = st.text(characters, max_size=40)
seconds = st.floats(0, 1e300, allow_nan=False)
wire_dtypes = st.sampled_from(dtypes.DTYPES)


@st.composite
def entries(draw: Draw) -> tuple[m.Entry, ...]:
    """Parameters as they stand in a hello or a layout."""
    unique = draw(st.lists(names, unique=True, max_size=6))
    found: list[m.Entry] = []
    while unique:
        k = draw(st.integers(1, 2))
        tied, unique = tuple(unique[:k]), unique[k:]
        shape = draw(st.lists(st.integers(0, 2**15), max_size=4).map(tuple))
        found.append((tied, shape, draw(wire_dtypes).code))
    return tuple(found)


@st.composite
def buckets(draw: Draw) -> m.Bucket:
    return m.Bucket(
        version=draw(versions),
        sequence=draw(counts),
        num_rows=draw(st.integers(1, 2**32 - 1)),
        raw_bytes=draw(st.integers(0, 2**30)),
        compression=draw(st.sampled_from(["none", "zstd"])),
    )


HELLO: dict[str, st.SearchStrategy[Any]] = {
    "parameters": entries(),
    "engine": names,
    "rank": st.just(0),
    "world": st.integers(1, 2**16),
    "format_versions": st.lists(st.integers(0, 2**16), max_size=3).map(tuple),
    "stream_id": st.none() | names,
    "version": st.none() | versions,
}
MESSAGES: dict[str, st.SearchStrategy[m.Message]] = {
    "hello": st.builds(m.Hello, **HELLO, connection=st.none(), lanes=st.just(0))
    | st.builds(m.Hello, **HELLO, connection=connections, lanes=st.integers(1, 2**16 - 1)),
    "lane": st.builds(m.Lane, connection=connections),
    "layout": st.builds(
        m.Layout, parameters=entries(), stream_id=names, version=versions, digest=digests
    ),
    "held": st.builds(
        m.Held,
        digest=digests,
        parts=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
        half_written=st.booleans(),
        max_staged_bytes=counts,
    ),
    "welcome": st.builds(m.Welcome, full_sync=engines),
    "upcoming": st.builds(m.Upcoming, version=versions),
    "begin": st.builds(
        m.Begin,
        stream_id=names,
        version=versions,
        base_version=st.none() | versions,
        layout_hash=st.binary(min_size=32, max_size=32).map(bytes.hex),
        sparse_bytes=counts,
        dense_bytes=counts,
        timeout_s=seconds,
    ),
    "attempt": st.builds(m.Attempt, number=counts),
    "bucket": buckets(),
    "prepare": st.builds(m.Prepare, version=versions, num_buckets=counts),
    "sealed": st.builds(m.Sealed, version=versions, digest=digests),
    "prepared": st.builds(m.Prepared, version=versions, digest=digests, staged_bytes=counts),
    "commit": st.builds(m.Commit, version=versions),
    "committed": st.builds(m.Committed, version=versions, digest=digests, commit_s=seconds),
    "finish": st.builds(m.Finish, version=versions, undo=engines),
    "abort": st.builds(m.Abort, version=versions, reason=texts),
    "failed": st.builds(m.Failed, version=st.none() | versions, error=texts, reason=texts),
    "refused": st.builds(m.Refused, error=texts, reason=texts),
}
messages = st.one_of(*MESSAGES.values())


def payload_bytes_of(message: m.Message) -> int:
    """A payload length that may go with `message`."""
    return message.raw_bytes if isinstance(message, m.Bucket) else 0


@st.composite
def layouts(draw: Draw, max_numel: int = 5000) -> tuple[ParameterSpec, ...]:
    """One to four parameters of one-dimensional shape; one may be empty."""
    numels = draw(st.lists(st.integers(0, max_numel), min_size=1, max_size=4))
    return tuple(
        ParameterSpec((f"p{i}",), (numel,), draw(wire_dtypes)) for i, numel in enumerate(numels)
    )


@st.composite
def runs(draw: Draw, specs: tuple[ParameterSpec, ...]) -> list[tuple[int, Run]]:
    """Ordered disjoint runs over `specs`, sparse and dense; perhaps none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for parameter, spec in enumerate(specs):
        cuts = draw(st.lists(st.integers(0, spec.numel), max_size=4).map(set))
        bounds = sorted(cuts | {0, spec.numel})
        for start, stop in pairwise(bounds):
            kind = draw(st.sampled_from(["absent", "sparse", "dense"]))
            if kind != "absent":
                count = draw(st.integers(1, stop - start))
                found.append(
                    (parameter, make_run(rng, spec, start, stop, count, dense=kind == "dense"))
                )
    return found


def make_run(
    rng: np.random.Generator,
    spec: ParameterSpec,
    start: int,
    stop: int,
    count: int,
    *,
    dense: bool,
) -> Run:
    """A run of random bits; `count` of its elements if it is sparse."""
    span = stop - start
    count = span if dense else count
    raw = torch.from_numpy(rng.integers(0, 256, count * spec.dtype.item_size, np.uint8))
    bits = raw.view(integer_dtype(spec.dtype))
    if dense:
        return Run(start, span, None, bits)
    chosen = np.sort(rng.choice(span, count, replace=False)).astype(np.int32)
    return Run(start, span, torch.from_numpy(chosen), bits)


def numels_and_item_sizes(specs: tuple[ParameterSpec, ...]) -> tuple[Uint64s, Uint64s]:
    """What `read_table` is told of a layout."""
    return (
        np.array([math.prod(s.shape) for s in specs], np.uint64),
        np.array([s.dtype.item_size for s in specs], np.uint64),
    )
