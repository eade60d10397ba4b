"""What a rank of a trainer sends, as a table: the payload of `Shares`.

docs/wire-format.md, section 6. A share is elements of a parameter: a run, or rows of one length
that are equally far apart.
"""

from __future__ import annotations

import numpy as np

SHARE = np.dtype(
    [
        ("parameter", "<u4"),
        ("reserved", "<u4"),
        ("start", "<u8"),
        ("rows", "<u8"),
        ("cols", "<u8"),
        ("stride", "<u8"),
    ]
)
"""The number of the parameter, where the first element lies, how many rows there are, elements of a
row, and from one row to the next."""
