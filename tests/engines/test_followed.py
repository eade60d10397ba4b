"""Cases of GPUs on a CPU: a whole engine follows a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.environment import use_cpu, use_sglang
from tests.engines.gpu.cases import CASES
from tests.engines.programs import Program, objects

NAMES = [
    "LlamaForCausalLM/channel FP8",
    "GptOssForCausalLM/eager",
    "LlamaForCausalLM/sleep",
    "LlamaForCausalLM/SGLang",
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_holds_what_it_would_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that Python can reach, or a checksum of SGLang's, and tokens."""
    case = CASES[name]
    if case.engine == "sglang":
        use_sglang(monkeypatch)
    else:
        use_cpu(monkeypatch, packs=False)
    with Program("-m", case.program, name, tmp_path) as program:
        text = program.wait(timeout_s=480)
    [found] = objects(text, '{"name"')
    assert found["outcome"] == "routed", found
    # The rotary table of gpt-oss gets another dtype when it first runs.
    moved = found.get("moved", ())
    assert all(path.endswith("rotary_emb.cos_sin_cache") for path in moved), found
