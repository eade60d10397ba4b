"""Several ways to a version: each is what its manifest says, and none is overlooked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreReceiver, StoreSender
from deltasync.delta.codecs.coding import Coding
from deltasync.errors import ProtocolViolation
from deltasync.store.anchors import PublishOptions
from deltasync.store.checkpoints import fetch_checkpoint
from deltasync.store.retention import gc
from deltasync.store.verifying import verify_run
from tests.store.raw import bytes_of, read, sha256
from tests.worlds.strategies import same_bits

NUMEL = 1000


class Frozen(nn.Module):
    """Three parameters, of which the first is never trained; each fills a file of an anchor."""

    def __init__(self, seed: int = 0, numel: int = NUMEL) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.randn(numel)))

    def step(self, number: int) -> None:
        with torch.no_grad():
            for name in "bc":
                self.get_parameter(name)[number * 10 : number * 10 + 40] *= 1.25


def sender_of(folder: Path, model: nn.Module, compression: Coding, **more: Any) -> StoreSender:
    return StoreSender(
        ModuleSource(model),
        folder,
        options=SenderOptions(stream_id="run", compression=compression),
        publishing=PublishOptions(anchor_file_bytes=4 * NUMEL, **more),
    )


def published(
    folder: Path, compression: Coding, versions: int, **more: Any
) -> dict[int, dict[str, Tensor]]:
    """The weights of each version."""
    model, states = Frozen(), dict[int, dict[str, Tensor]]()
    sender = sender_of(folder, model, compression, **more)
    for number in range(1, versions + 1):
        sender.publish()
        states[number] = {name: one.clone() for name, one in model.state_dict().items()}
        model.step(number)
    return states


def holds(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(same_bits(model.state_dict()[name], one) for name, one in state.items())


def reader_of(folder: Path, state: dict[str, Tensor] | None = None) -> tuple[Frozen, StoreReceiver]:
    engine = Frozen(seed=1)
    if state is not None:
        engine.load_state_dict(state)
    return engine, StoreReceiver(ModuleTarget(engine), folder)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def file_of(folder: Path, version: int, number: int) -> Path:
    (path,) = folder.glob(f"run/objects/{version:016}-anchor-*/model-{number:05}-of-*")
    return path


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_verify_reads_each_anchor_though_it_begins_as_another(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    published(tmp_path, "gap", 4, anchor_every=3)
    first, second = (file_of(tmp_path, version, 1) for version in (1, 4))
    assert first.read_bytes() == second.read_bytes()
    assert verify_run(tmp_path).faults == []
    damage(file_of(tmp_path, 4, 2))
    found = verify_run(tmp_path)
    assert [(fault.version, fault.what) for fault in found.faults] == [(4, "anchor")]
    assert found.proved == [1, 2, 3, 4], "by the delta"


def test_verify_finds_a_version_that_does_not_name_the_one_before(tmp_path: Path) -> None:
    published(tmp_path, "zstd", 3)
    path = tmp_path / f"run/manifests/{2:016}.json"
    path.write_bytes(bytes_of(read(path) | {"written_at": "2026"}))
    found = verify_run(tmp_path)
    assert [(fault.version, fault.what) for fault in found.faults] == [(3, "manifest")]


def test_verify_says_of_a_full_disk_that_it_is_one(tmp_path: Path) -> None:
    """In a process of its own: all files of this one would be limited."""
    published(tmp_path, "gap", 4, anchor_every=3)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
        "from deltasync.store.verifying import verify_run; verify_run(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert "ConfigError" in done.stderr.splitlines()[-1]
    assert "free some space" in done.stderr


def test_what_is_collected_while_it_is_verified_is_no_fault(tmp_path: Path) -> None:
    published(tmp_path, "gap", 8, anchor_every=3)

    def phase(name: str, total: int) -> Callable[[int], None]:
        return lambda versions: seen.append(gc(tmp_path, keep=1, keep_s=0).versions)

    seen = list[int]()
    found = verify_run(tmp_path, phase=phase)
    assert found.faults == []
    assert found.proved == [1, 7, 8]
    assert seen == [6, *[0] * 7]


@pytest.mark.parametrize("compression", ["zstd", "gap", "class"])
def test_a_damaged_anchor_leaves_nothing_to_an_older_one_that_begins_alike(
    tmp_path: Path, compression: Coding
) -> None:
    states = published(tmp_path, compression, 5, anchor_every=3)
    flip(file_of(tmp_path, 4, 3))
    engine, receiver = reader_of(tmp_path)
    assert receiver.fetch(timeout_s=20) == 5
    assert holds(engine, states[5])
    receiver.close()


@pytest.mark.parametrize("compression", ["zstd", "gap", "block", "class"])
def test_s05_frames_of_a_larger_layout_are_refused_before_they_are_decoded(
    tmp_path: Path, compression: Coding
) -> None:
    """Positions that the weights have not would be an IndexError of torch."""
    folder, larger = tmp_path / "store", tmp_path / "larger"
    states = published(folder, compression, 3)
    model = Frozen(numel=NUMEL * 10)
    sender = sender_of(larger, model, compression)
    sender.publish()
    with torch.no_grad():
        model.get_parameter("b")[5 * NUMEL :: 3] *= 1.25
    sender.publish()
    for path in folder.glob("run/objects/0000000000000002-delta-*"):
        (other,) = larger.glob("run/objects/0000000000000002-delta-*")
        path.write_bytes(other.read_bytes())
    link_again(folder)
    engine, receiver = reader_of(folder, states[1])
    with pytest.raises(ProtocolViolation, match="its layout says"):
        receiver.fetch(3, timeout_s=5)
    assert holds(engine, states[1])
    assert not receiver.is_dirty
    receiver.close()
    with pytest.raises(ProtocolViolation, match="its layout says"):
        fetch_checkpoint(folder, tmp_path / "out")
    assert [(fault.version, fault.what) for fault in verify_run(folder).faults] == [(2, "delta")]


def link_again(folder: Path) -> None:
    """Let manifests name objects, and each the one before, as they are."""
    parent = None
    for path in sorted(folder.glob("run/manifests/*.json")):
        record = read(path)
        for file in record["way"]["files"]:
            data = (folder / "run" / file["key"]).read_bytes()
            file |= {"bytes": len(data), "sha256": sha256(data)}
        data = bytes_of(record | {"parent": parent})
        path.write_bytes(data)
        parent = {"version": record["version"], "sha256": sha256(data)}
