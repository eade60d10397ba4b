"""Our vLLM backend against the interface of each version that is noted, without a vLLM.

`vllm_interface.py` notes a version, and says how to add one. What an old one lacks is listed here.
"""

from __future__ import annotations

import pytest

from tests.integrations.vllm_interface import noted
from tests.integrations.vllm_uses import (
    BASE,
    TRAINER_BASE,
    arguments,
    methods,
    our_class,
    uses,
)

VERSIONS = noted()
_LLM, _ASYNC_LLM = "vllm.entrypoints.llm.LLM", "vllm.v1.engine.async_llm.AsyncLLM"
_WORKER = "vllm.v1.worker.gpu_worker.Worker"
# Versions have no names. Servers ignore them, and `OfflineClient` and `AsyncClient` fail.
_NO_NAMES = {f"{_LLM}.finish_weight_update", f"{_ASYNC_LLM}.finish_weight_update"}
# There is nothing that would have to be announced.
_NO_RESET = {f"{_WORKER}.reset_weights"}
_NO_DISCARD = {f"{_WORKER}.discard"}
# An update takes several calls.
_NO_CORE_NAMES = {"vllm.v1.engine.core.EngineCoreProc.set_weight_version"}
# The trainer's half takes a configuration: `vllm_trainer` says which vLLM it needs.
_OTHER_TRAINERS = {f"{TRAINER_BASE}.__init__"}
MISSING: dict[str, set[str]] = {
    "0.26.0": _NO_RESET | _NO_DISCARD | _NO_NAMES | _NO_CORE_NAMES | _OTHER_TRAINERS,
    "0.27.0": _NO_RESET | _NO_DISCARD,
    "0.28.0": _NO_RESET | _NO_DISCARD,
    "0.30.0": _NO_RESET | _NO_DISCARD,
    "0.31.0": _NO_RESET,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_has_what_we_use_with_arguments_as_ours(version: str) -> None:
    missing = {use.name for use in uses() if not use.fits(VERSIONS[version])}
    assert missing == MISSING.get(version, set())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("ours", "base"), [("DeltaSyncEngine", BASE), ("DeltaSyncTrainer", TRAINER_BASE)]
)
def test_our_classes_implement_what_is_abstract(version: str, ours: str, base: str) -> None:
    abstract = {
        name.removeprefix(f"{base}."): fact.removeprefix("abstract ")
        for name, fact in VERSIONS[version].items()
        if fact.startswith("abstract") and name.startswith(f"{base}.")
    }
    assert abstract
    implemented = {method.name: arguments(method) for method in methods(our_class(ours))}
    other = {
        name: required
        for name, required in abstract.items()
        if without_defaults(implemented.get(name, "")) != without_defaults(required)
    }
    takes_more = {"trainer_init": "(config, init_info, *, client, source)"}
    expected = takes_more if (version, base) == ("0.26.0", TRAINER_BASE) else {}
    assert other == expected


def without_defaults(arguments: str) -> str:
    return arguments.replace("=None", "")
