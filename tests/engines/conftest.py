"""Engines are large: their tests are collected where they are installed, by `make test-engines`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
