"""`fetch`, `verify URL` and `log`, on folders and on S3."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from deltasync.files.checkpoint import Checkpoint
from tests.cli.command import call, in_terminal, output, refused, start
from tests.worlds.faults import faulty
from tests.worlds.programs import completed
from tests.worlds.published import RUN, Publisher
from tests.worlds.stores import KEYS, Place, local_place, s3_place, s3_server
from tests.worlds.strategies import same_bits

ABSENT = {"3.weight"}  # tied to 0.weight, which stands for both


@pytest.fixture
def trainer(tmp_path: Path) -> Publisher:
    """A run of 5 versions with anchors at v1 and v4."""
    made = Publisher(local_place(tmp_path / "store"), anchor_every=3)
    made.publish(5)
    return made


def assert_is(path: Path, state: Mapping[str, Tensor]) -> None:
    found = Checkpoint(path)
    assert set(found.specs) == state.keys() - ABSENT
    assert all(same_bits(found.tensor(name), state[name]) for name in found.specs)


def test_versions_are_fetched_bit_for_bit_also_from_a_checkpoint(
    trainer: Publisher, tmp_path: Path
) -> None:
    url = trainer.place.url
    for to in (2, 5):
        text = output("fetch", url, "--to", f"{to}", "--out", tmp_path / f"v{to}")
        assert_is(tmp_path / f"v{to}", trainer.states[to])
        assert f": v{to}, " in text
        assert "; fetched 1 anchor + 1 delta, " in text
    text = output("fetch", url, "--base", tmp_path / "v2", "--out", tmp_path / "newest")
    assert_is(tmp_path / "newest", trainer.states[5])
    assert "; fetched 3 delta, " in text


def test_progress_is_drawn_in_terminals_alone(trainer: Publisher, tmp_path: Path) -> None:
    words = "fetch", trainer.place.url, "--out"
    drawn = in_terminal(*words, tmp_path / "drawn")
    assert re.search(r"fetch.*/[\d.]+ [kM]?B", drawn), drawn
    assert call(*words, tmp_path / "piped").stderr == ""


def test_nothing_is_left_of_what_failed(trainer: Publisher, tmp_path: Path) -> None:
    url, out = trainer.place.url, tmp_path / "out"
    before = sorted(tmp_path.rglob("*"))
    done = call("fetch", url, "--out", out, limits={resource.RLIMIT_FSIZE: 1000})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert sorted(tmp_path.rglob("*")) == before
    for path in (tmp_path / "store").glob("objects/*anchor*/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert "altered" in refused("fetch", url, "--out", out)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_wrong_is_listed(trainer: Publisher, tmp_path: Path) -> None:
    assert "5 of 5 versions are proved, 0 faults" in output("verify", trainer.place.url)
    (path,) = (tmp_path / "store").glob("objects/*2-delta-*")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    manifest = tmp_path / "store" / f"manifests/{5:016}.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    text = output("verify", trainer.place.url, code=1)
    assert "2 of 5 versions are proved, 2 faults" in text
    assert re.search(r"v2 +delta +ObjectDamaged", text)
    assert re.search(r"v5 +manifest ", text)


def test_log_lists_versions(trainer: Publisher) -> None:
    text = output("log", trainer.place.url)
    assert text.startswith(f"run {RUN}: 5 versions, the newest is v5\n")
    numel = sum(t.numel() for name, t in trainer.states[5].items() if name not in ABSENT)
    rows = [line for line in text.splitlines() if line.startswith("  v")]
    for row, version in zip(rows[1:], (5, 4, 3, 2, 1), strict=True):
        assert re.match(rf"  v{version} +{numel:,} ", row)
        assert ("anchor" in row) == (version in (1, 4))
        assert ("delta" in row) == (version > 1)
    text = output("log", trainer.place.url, "--limit", "2")
    assert re.findall(r"^  v(\d)", text, re.MULTILINE) == ["5", "4"]


def test_what_cannot_be_used_is_refused(trainer: Publisher, tmp_path: Path) -> None:
    url, out = trainer.place.url, tmp_path / "out"
    assert "--to" in refused("fetch", url, "--to", "nine", "--out", out)
    assert "VersionMissing" in refused("fetch", url, "--to", "9", "--out", out)
    (tmp_path / "none").mkdir()
    assert "no such folder" in refused("log", tmp_path / "gone")
    assert "check the URL" in refused("verify", tmp_path / "none")
    assert "is not like KEY=VALUE" in refused("log", url, "--config", "x")
    assert "ftp://***@127.0.0.1/x" in refused("log", "ftp://user:s3cr3t@127.0.0.1/x")


def test_keys_and_remote_stores(tmp_path: Path) -> None:
    with s3_server() as endpoint:
        place = s3_place(endpoint)
        options = place.options.model_validate({**dict(place.options), "mac_key": b"secret"})
        trainer = Publisher(Place(place.url, options))
        trainer.publish(3)
        key, out = tmp_path / "key", tmp_path / "out"
        config = [f"endpoint={endpoint}", *(f"{name}={value}" for name, value in KEYS.items())]
        reach = [word for pair in config for word in ("--config", pair)]
        reach += ["--key-file", str(key)]
        for content, why in ((None, "No such file"), (b"", "is empty"), (b"wrong", "MacMismatch")):
            if content is not None:
                key.write_bytes(content)
            assert why in refused("fetch", place.url, "--out", out, *reach)
            assert why in refused("log", place.url, *reach)
        key.write_bytes(b"secret\n")
        output("fetch", place.url, "--out", out, *reach)
        assert_is(out, trainer.states[3])
        assert "3 of 3 versions are proved" in output("verify", place.url, *reach)
        assert "3 versions" in output("log", place.url, *reach)


def test_ctrl_c_ends_the_wait_for_a_store_that_never_answers(tmp_path: Path) -> None:
    with s3_server() as s3, faulty(s3) as (endpoint, faults):
        place = s3_place(s3)
        Publisher(place).publish(2)
        reached, faults.slow_s = threading.Event(), 250.0

        def choose(method: str, path: str) -> str | None:
            if "objects/" in path:
                reached.set()
            return "slow" if reached.is_set() else None

        faults.choose = choose
        config = ["endpoint=" + endpoint, *map("=".join, KEYS.items())]
        reach = [word for pair in config for word in ("--config", pair)]
        process = start("fetch", place.url, "--out", tmp_path / "out", *reach)
        assert reached.wait(150)
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        done = completed(process)
        assert time.monotonic() - began < 120
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not (tmp_path / "out").exists()
