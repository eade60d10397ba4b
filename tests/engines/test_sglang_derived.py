"""What SGLang's models compute from their weights follows every sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync import SenderOptions
from deltasync.errors import ConfigError
from deltasync.integrations.engine_sync import EngineSync
from deltasync.transports import shared_memory
from tests.engines import sglang_models as sglang
from tests.engines.checkpoints import Weights
from tests.engines.environment import use_sglang
from tests.engines.reached import Seen, seen
from tests.engines.toys import random_weights, touched
from tests.worlds.ranks import run_ranks

Found = Callable[[str, str, str, str], None]
BUCKET_BYTES = 1 << 15  # less than the matrices that DeepSeek's loader pairs


def versions(folder: Path, architecture: str) -> list[dict[str, Tensor]]:
    """Those the engine is started on, those of a full sync, and those of a delta."""
    specs = sglang.write_config(architecture, folder)
    second = random_weights(specs, 1)
    return [random_weights(specs, 0), second, touched(second, 3, 2)]


def cold(place: Path, number: int) -> Path:
    """What a worker holds that was just started on a version."""
    return place / f"cold-{number}.safetensors"


def follow(_: int, architecture: str, place: Path) -> None:
    folder = place / "model"
    first, *others = versions(folder, architecture)
    sglang.write_weights(folder, first)
    model = sglang.started(folder)
    before = seen(model)
    source = Weights({name: tensor.clone() for name, tensor in others[0].items()})
    transport = shared_memory.Sender(folder / "socket")
    options = SenderOptions(bucket_bytes=BUCKET_BYTES)
    with EngineSync(source, sglang.Server(model), transport, options=options) as sync:
        for number, weights in enumerate(others, 1):
            source.take(weights)
            stats = sync.send_weights()
            assert stats.kind == ("full" if number == 1 else "delta")
            now = seen(model)
            assert differences(now, cold(place, number)) == []
            moved = [path for path, one in now.items() if one.address != before[path].address]
            assert moved == []  # a captured graph would read what was there


def be_refused(_: int, folder: Path) -> None:
    specs = sglang.write_config("KimiK3LinearForCausalLM", folder, sglang.RESIDUAL)
    weights = random_weights(specs, 0)
    sglang.write_weights(folder, weights)
    model = sglang.started(folder)
    before = seen(model)
    transport = shared_memory.Sender(folder / "socket")
    with (
        EngineSync(Weights(weights), sglang.Server(model), transport) as sync,
        pytest.raises(ConfigError, match="_res_proj"),
    ):
        sync.connect()
    now = seen(model)
    assert now.keys() == before.keys()
    assert all(one.has_bits_of(before[path]) for path, one in now.items())
    assert [path for path, one in now.items() if one.address != before[path].address] == []


def differences(now: dict[str, Seen], file: Path) -> list[str]:
    """What is not as a worker has it that was started on the same weights."""
    ours, theirs = sglang.named(now), sglang.kept(file)
    both = ours.keys() & theirs.keys()
    return sorted((ours.keys() ^ theirs.keys()) | {n for n in both if not same(ours[n], theirs[n])})


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right)


@pytest.mark.timeout(360)
@pytest.mark.parametrize("architecture", sglang.CONFIGS)
def test_what_is_computed_from_weights_follows(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Found
) -> None:
    use_sglang(monkeypatch)
    folder = tmp_path / "model"
    folder.mkdir()
    for number, weights in enumerate(versions(folder, architecture)):
        sglang.write_weights(folder, weights)
        if number:
            run_ranks(sglang.keep_started, 1, folder, cold(tmp_path, number), timeout_s=110)
    run_ranks(follow, 1, architecture, tmp_path, timeout_s=110)
    found("SGLang", architecture, "1", "routed")


@pytest.mark.timeout(360)
def test_what_is_computed_once_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own loader leaves it as it was computed first: a fresh engine has something else."""
    use_sglang(monkeypatch)
    run_ranks(be_refused, 1, tmp_path, timeout_s=110)
