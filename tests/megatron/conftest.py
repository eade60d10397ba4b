"""Megatron is large: these tests are collected where it is installed, by `make test-megatron`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]
