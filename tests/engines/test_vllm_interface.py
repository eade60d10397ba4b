"""What is noted of the vLLM that is installed is what it has."""

from __future__ import annotations

from pathlib import Path

import vllm

from tests.integrations.vllm_interface import facts_of, noted


def test_the_installed_version_is_noted_as_it_is() -> None:
    assert facts_of(Path(vllm.__file__).parents[1]) == noted()[vllm.__version__]
