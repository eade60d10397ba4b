"""Raising the very type, where a caller matches on it."""

from __future__ import annotations

from typing import Any

import pytest


def exactly(error: type[Exception]) -> Any:
    """The very type is raised, not one derived from it."""
    return pytest.raises(error, check=lambda raised: type(raised) is error)
