"""The trainer's half of vLLM's interface, where vLLM is missing or too old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As in vLLM 0.26, whose trainers take a configuration, and in an older one.
OLD_BASE = """
class TrainerInitInfo:
    rank: int

class TrainerWeightTransferEngine:
    pass
"""
OLD_INIT = "HTTPVLLMWeightSyncClient = WeightTransferTrainerFactory = None"


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A vLLM without the trainer's half that is needed is a `ConfigError` that says which one is.",
)
@pytest.mark.parametrize(
    ("init", "base", "problem"),
    [
        (None, None, "there is no vLLM with a trainer's half here"),
        ("", OLD_BASE, "there is no vLLM with a trainer's half here"),
        (OLD_INIT, "", "there is no vLLM with a trainer's half here"),
        (OLD_INIT, OLD_BASE, "the trainer's half of this vLLM wants a configuration, too"),
    ],
)
def test_which_vllm_is_needed_is_in_the_error(
    init: str | None, base: str | None, problem: str, tmp_path: Path
) -> None:
    package = tmp_path / "vllm" / "distributed" / "weight_transfer"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent):
        (folder / "__init__.py").touch()
    if init is not None and base is not None:
        (package / "__init__.py").write_text(init, encoding="utf-8")
        (package / "base.py").write_text(base, encoding="utf-8")
    code = (
        "from deltasync.errors import ConfigError\n"
        "try:\n    import deltasync.integrations.vllm_trainer\n"
        "except ConfigError as error:\n    print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    assert problem in told
    assert "use vLLM 0.27 or newer here" in told
