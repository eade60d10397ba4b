"""A receiver that forwards what it has verified."""

from __future__ import annotations
