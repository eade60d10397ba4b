"""`fetch`, `export` and `verify URL`: checkpoints of a store, and what is wrong with one."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deltasync.files.checkpoint import Checkpoint
from tests.cli.command import COMMAND, call, hearing_signals, run, start
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


def told(*arguments: str | Path) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(*arguments: str | Path, code: int = 2) -> str:
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.count("\n") == 1
    return done.stderr


def assert_is(path: Path, state: Mapping[str, Tensor]) -> None:
    found = Checkpoint(path)
    assert set(found.specs) == state.keys() - ABSENT
    assert all(same_bits(found.tensor(name), state[name]) for name in found.specs)


@pytest.mark.parametrize("to", [1, 3, 4, 5])
def test_every_version_is_written_bit_for_bit(trainer: Publisher, tmp_path: Path, to: int) -> None:
    found = told("fetch", trainer.place.url, "--to", f"v{to}", "--out", tmp_path / "out")
    assert_is(tmp_path / "out", trainer.states[to])
    assert (found["run"], found["version"]) == (RUN, to)
    assert found["ways"][0] == "anchor"


def test_a_checkpoint_that_is_there_saves_bytes(trainer: Publisher, tmp_path: Path) -> None:
    url = trainer.place.url
    told("fetch", url, "--to", "2", "--out", tmp_path / "v2")
    found = told("fetch", url, "--base", tmp_path / "v2", "--out", tmp_path / "v5")
    assert_is(tmp_path / "v5", trainer.states[5])
    assert found["ways"] == ["delta"] * 3
    assert found["fetched_bytes"] < found["num_bytes"]
    same = told("fetch", url, "--base", tmp_path / "v5", "--out", tmp_path / "same")
    assert same["ways"] == []
    assert_is(tmp_path / "same", trainer.states[5])
    assert_is(tmp_path / "v2", trainer.states[2])


def test_people_get_one_line(trainer: Publisher, tmp_path: Path) -> None:
    done = run(*COMMAND, "fetch", trainer.place.url, "--to", "v3", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "v3 of run run" in done.stdout
    assert "1 anchor + 2 deltas" in done.stdout


def test_the_newest_delta_may_be_gone(trainer: Publisher, tmp_path: Path) -> None:
    (path,) = (tmp_path / "store" / RUN).glob("objects/*5-delta-*")
    path.unlink()
    line = refused("fetch", trainer.place.url, "--out", tmp_path / "out")
    assert "ObjectDamaged" in line
    assert not (tmp_path / "out").exists()
    for to in range(1, 5):
        out = tmp_path / f"v{to}"
        told("fetch", trainer.place.url, "--to", f"v{to}", "--out", out)
        assert_is(out, trainer.states[to])


def test_nothing_is_left_of_what_failed(trainer: Publisher, tmp_path: Path) -> None:
    for path in (tmp_path / "store" / RUN).glob("objects/*anchor*/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    line = refused("fetch", trainer.place.url, "--out", tmp_path / "out")
    assert "altered" in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("limit", [1000, 2000])
def test_a_full_disk_is_one_line(trainer: Publisher, tmp_path: Path, limit: int) -> None:
    done = call(
        "fetch",
        trainer.place.url,
        "--out",
        tmp_path / "out",
        limits={resource.RLIMIT_FSIZE: limit},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_wrong_arguments_are_refused(trainer: Publisher, tmp_path: Path) -> None:
    url, out = trainer.place.url, tmp_path / "out"
    assert "v9" in refused("fetch", url, "--to", "nine", "--out", out)
    assert "VersionMissing" in refused("fetch", url, "--to", "v9", "--out", out)
    assert "no such folder" in refused("fetch", tmp_path / "none", "--out", out)
    assert "RunUnknown" in refused("fetch", url, "--run", "other", "--out", out)
    out.mkdir()
    assert "exists" in refused("fetch", url, "--out", out)
    assert "second one" in refused("verify", url, "--digest")
    assert "--run" in refused("verify", url, url, "--run", RUN)


def test_a_good_store_is_proved(trainer: Publisher) -> None:
    found = told("verify", trainer.place.url)
    assert (found["proved"], found["faults"]) == ([1, 2, 3, 4, 5], [])
    done = call("verify", trainer.place.url)
    assert done.returncode == 0
    assert "5 of 5 versions are proved" in done.stdout


def test_what_is_wrong_is_listed(trainer: Publisher, tmp_path: Path) -> None:
    run_folder = tmp_path / "store" / RUN
    (path,) = run_folder.glob("objects/*2-delta-*")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    manifest = run_folder / "manifests/0000000000000005.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    done = call("verify", trainer.place.url, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["proved"] == [1, 4]
    assert [(f["version"], f["what"]) for f in found["faults"]] == [(2, "delta"), (5, "manifest")]
    text = call("verify", trainer.place.url).stdout
    assert "2 of 5 versions are proved" in text
    assert "ObjectDamaged" in text


def test_keys_and_remote_stores(tmp_path: Path) -> None:
    with s3_server() as endpoint:
        place = s3_place(endpoint)
        options = place.options.model_validate({**dict(place.options), "mac_key": b"secret"})
        trainer = Publisher(Place(place.url, options))
        trainer.publish(3)
        key = tmp_path / "key"
        key.write_bytes(b"secret")
        config = [f"endpoint={endpoint}", *(f"{name}={value}" for name, value in KEYS.items())]
        reach = [word for pair in config for word in ("--config", pair)]
        told("fetch", place.url, "--out", tmp_path / "out", "--key-file", key, *reach)
        assert_is(tmp_path / "out", trainer.states[3])
        found = told("verify", place.url, "--key-file", key, *reach)
        assert found["proved"] == [1, 2, 3]
        key.write_bytes(b"wrong")
        line = refused("fetch", place.url, "--out", tmp_path / "no", "--key-file", key, *reach)
        assert "MacMismatch" in line


@pytest.mark.parametrize("silent", ["", "objects/"])
def test_ctrl_c_ends_the_wait_for_a_store_that_never_answers(tmp_path: Path, silent: str) -> None:
    with s3_server() as s3, faulty(s3) as (endpoint, faults), hearing_signals():
        place = s3_place(s3)
        Publisher(place).publish(2)
        reached, faults.slow_s = threading.Event(), 60.0

        def choose(method: str, path: str) -> str | None:
            if silent in path:
                reached.set()
            return "slow" if reached.is_set() else None

        faults.choose = choose
        config = [word for key in KEYS.items() for word in ("--config", "=".join(key))]
        words: list[str | Path] = [
            "fetch",
            place.url,
            "--out",
            tmp_path / "out",
            "--config",
            f"endpoint={endpoint}",
        ]
        process = start(*words, *config)
        assert reached.wait(60)
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        done = completed(process)
        assert time.monotonic() - began < 30
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not (tmp_path / "out").exists()
