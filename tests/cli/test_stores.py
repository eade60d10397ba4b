"""`fetch`, `verify URL`, `log` and `gc`, on folders and on S3."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from deltasync.files.checkpoint import Checkpoint
from tests.cli.command import call, refused, shown, start
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
        found = shown("fetch", url, "--to", f"{to}", "--out", tmp_path / f"v{to}")
        assert_is(tmp_path / f"v{to}", trainer.states[to])
        assert (found["version"], found["ways"][0]) == (to, "anchor")
    found = shown("fetch", url, "--base", tmp_path / "v2", "--out", tmp_path / "newest")
    assert_is(tmp_path / "newest", trainer.states[5])
    assert found["ways"] == ["delta"] * 3
    assert found["fetched_bytes"] < found["num_bytes"]
    done = call("fetch", url, "--to", "3", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "v3" in done.stdout
    assert "1 anchor + 2 delta" in done.stdout


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
    found = shown("verify", trainer.place.url)
    assert (found["proved"], found["faults"]) == ([1, 2, 3, 4, 5], [])
    assert "5 of 5 versions are proved" in call("verify", trainer.place.url).stdout
    (path,) = (tmp_path / "store").glob("objects/*2-delta-*")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    manifest = tmp_path / "store" / f"manifests/{5:016}.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    found = shown("verify", trainer.place.url, code=1)
    assert found["proved"] == [1, 4]
    assert [(f["version"], f["what"]) for f in found["faults"]] == [(2, "delta"), (5, "manifest")]
    text = call("verify", trainer.place.url).stdout
    assert "2 of 5 versions are proved" in text
    assert "ObjectDamaged" in text


def test_log_lists_versions(trainer: Publisher) -> None:
    found = shown("log", trainer.place.url)
    assert {entry["run"] for entry in found["versions"]} == {RUN}
    assert [entry["version"] for entry in found["versions"]] == [5, 4, 3, 2, 1]
    kinds = [[way["kind"] for way in entry["ways"]] for entry in found["versions"]]
    assert kinds == [["delta"], ["delta", "anchor"], ["delta"], ["delta"], ["anchor"]]
    newest = found["versions"][0]
    assert 0 < newest["nnz"] < newest["numel"]
    text = call("log", trainer.place.url, "--limit", "2").stdout
    for words in (f"run run: v5, {newest['numel']:,} elements", "anchor", "and 3 older versions"):
        assert words in text


def test_gc_deletes_what_nobody_needs(trainer: Publisher) -> None:
    url = trainer.place.url
    assert shown("gc", url, "--keep", "2")["versions"] == 0, "all are young"
    planned = shown("gc", url, "--keep", "2", "--keep-hours", "0", "--dry-run")
    assert (planned["dry_run"], planned["versions"], planned["oldest"]) == (True, 3, 4)
    text = call("gc", url, "--keep", "2", "--keep-hours", "0").stdout
    assert "deleted 3 versions" in text
    assert "v4 to v5 stay" in text
    assert [entry["version"] for entry in shown("log", url)["versions"]] == [5, 4]


def test_uploads_of_no_version_go_after_hours(trainer: Publisher, tmp_path: Path) -> None:
    left = tmp_path / f"store/objects/{5:016}-delta-{0:016}.dsyn"
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 2 * 3600,) * 2)
    for hours, count in ((3, 0), (1, 1)):
        found = shown("gc", trainer.place.url, "--keep-hours", str(hours))
        assert found["unfinished"] == count


def test_what_cannot_be_used_is_refused(trainer: Publisher, tmp_path: Path) -> None:
    url, out = trainer.place.url, tmp_path / "out"
    assert "--to" in refused("fetch", url, "--to", "nine", "--out", out)
    assert "VersionMissing" in refused("fetch", url, "--to", "9", "--out", out)
    (tmp_path / "none").mkdir()
    for command in ("fetch", "log", "gc", "verify"):
        more = ("--out", str(out)) if command == "fetch" else ()
        assert "no such folder" in refused(command, tmp_path / "gone", *more)
        assert "check the URL" in refused(command, tmp_path / "none", *more)
        assert "is not like KEY=VALUE" in refused(command, url, "--config", "x", *more)
        line = refused(command, "ftp://user:s3cr3t@127.0.0.1/x", *more)
        assert "ftp://***@127.0.0.1/x" in line
        assert "s3cr3t" not in line


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
            assert why in refused("gc", place.url, *reach)
        key.write_bytes(b"secret\n")
        shown("fetch", place.url, "--out", out, *reach)
        assert_is(out, trainer.states[3])
        assert shown("verify", place.url, *reach)["proved"] == [1, 2, 3]
        assert len(shown("log", place.url, *reach)["versions"]) == 3


def test_ctrl_c_ends_the_wait_for_a_store_that_never_answers(tmp_path: Path) -> None:
    with s3_server() as s3, faulty(s3) as (endpoint, faults):
        place = s3_place(s3)
        Publisher(place).publish(2)
        reached, faults.slow_s = threading.Event(), 60.0

        def choose(method: str, path: str) -> str | None:
            if "objects/" in path:
                reached.set()
            return "slow" if reached.is_set() else None

        faults.choose = choose
        config = ["endpoint=" + endpoint, *map("=".join, KEYS.items())]
        reach = [word for pair in config for word in ("--config", pair)]
        process = start("fetch", place.url, "--out", tmp_path / "out", *reach)
        assert reached.wait(60)
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        done = completed(process)
        assert time.monotonic() - began < 30
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not (tmp_path / "out").exists()
