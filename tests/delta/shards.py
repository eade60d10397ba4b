"""How the ranks of a trainer may hold a model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from hypothesis import strategies as st

from deltasync.delta.shard import ShardSpec, placed

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3)]


@st.composite
def placements(
    draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]]
) -> list[dict[str, ShardSpec]]:
    """What each rank of a mesh holds of each tensor: split in any dimension, or repeated."""
    mesh = draw(st.sampled_from(MESHES))
    splits = {
        name: [
            draw(st.none() | st.tuples(st.integers(0, len(shape) - 1), st.just(1)))
            if shape
            else None
            for _ in mesh
        ]
        for name, shape in shapes.items()
    }
    return [
        {name: placed(shape, mesh, coordinate, splits[name]) for name, shape in shapes.items()}
        for coordinate in product(*map(range, mesh))
    ]
