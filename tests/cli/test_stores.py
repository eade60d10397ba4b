"""`log` and `gc`, on folders and on S3."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import ModuleSource
from deltasync.store.anchors import PublishOptions
from deltasync.store.objects import StoreOptions
from deltasync.store.sender import StoreSender
from deltasync.sync.options import SenderOptions
from tests.cli.command import COMMAND, call, run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    publish(tmp_path / "store", "one", 5)
    return tmp_path / "store"


@pytest.mark.parametrize("command", ["log", "gc", "verify"])
def test_no_command_shows_the_password_of_a_url(command: str) -> None:
    done = call(command, "ftp://user:s3cr3t@127.0.0.1/x")
    assert done.returncode == 2
    assert "ftp://***@127.0.0.1/x" in done.stderr
    assert "s3cr3t" not in done.stdout + done.stderr


def publish(store: Path, run: str, versions: int, *, key: bytes | None = None) -> None:
    model = nn.Linear(64, 64)
    sender = StoreSender(
        ModuleSource(model),
        store,
        options=SenderOptions(stream_id=run, compression="zstd"),
        store=StoreOptions.model_validate({"mac_key": key}),
        publishing=PublishOptions(anchor_every=3),
    )
    for number in range(versions):
        sender.publish()
        with torch.no_grad():
            model.weight[number] += 1


def told(*arguments: str | Path) -> Any:
    done = call(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def refused(*arguments: str | Path) -> str:
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_log_lists_versions(store: Path) -> None:
    found = told("log", store)
    assert found["run"] == "one"
    assert [entry["version"] for entry in found["versions"]] == [5, 4, 3, 2, 1]
    kinds = [[way["kind"] for way in entry["ways"]] for entry in found["versions"]]
    assert kinds == [["delta"], ["delta", "anchor"], ["delta"], ["delta"], ["anchor"]]
    newest = found["versions"][0]
    assert (newest["nnz"], newest["numel"]) == (64, 64 * 65)
    few = told("log", store / "one", "--limit", "2")
    assert ([e["version"] for e in few["versions"]], few["older"]) == ([5, 4], 3)


def test_log_shows_a_table(store: Path) -> None:
    done = run(*COMMAND, "log", store, "--limit", "2")
    assert done.returncode == 0
    assert "run one: v5, 4,160 elements" in done.stdout
    assert "anchor" in done.stdout
    assert "and 3 older versions" in done.stdout


def test_gc_deletes_what_nobody_needs(store: Path) -> None:
    assert told("gc", store, "--keep", "2")["versions"] == 0, "all are young"
    planned = told("gc", store, "--keep", "2", "--keep-hours", "0", "--dry-run")
    assert (planned["dry_run"], planned["versions"], planned["oldest"]) == (True, 3, 4)
    done = run(*COMMAND, "gc", store, "--keep", "2", "--keep-hours", "0")
    assert done.returncode == 0
    assert "deleted 3 versions" in done.stdout
    assert "v4 to v5 stay" in done.stdout
    assert [entry["version"] for entry in told("log", store)["versions"]] == [5, 4]


def test_uploads_of_no_version_go_after_hours(store: Path) -> None:
    left = store / f"one/objects/{5:016}-delta-{0:016}.dsyn"
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 2 * 3600,) * 2)
    for hours, count in ((3, 0), (1, 1)):
        assert told("gc", store, "--keep-hours", str(hours))["unfinished"] == count


def test_several_runs_have_to_be_named(store: Path) -> None:
    publish(store, "two", 1)
    said = refused("log", store)
    assert "'one'" in said
    assert "'two'" in said
    assert told("log", store, "--run", "two")["run"] == "two"
    assert "no run 'none'" in refused("gc", store, "--run", "none")


def test_signed_runs_need_their_key(tmp_path: Path) -> None:
    publish(tmp_path / "store", "one", 2, key=b"secret")
    right, wrong, empty = tmp_path / "right", tmp_path / "wrong", tmp_path / "empty"
    right.write_bytes(b"secret")
    wrong.write_bytes(b"other")
    empty.write_bytes(b"")
    assert len(told("log", tmp_path / "store", "--key-file", right)["versions"]) == 2
    for command in ("log", "gc"):
        assert "MacMismatch" in refused(command, tmp_path / "store", "--key-file", wrong)
        assert "is empty" in refused(command, tmp_path / "store", "--key-file", empty)
        assert "none" in refused(command, tmp_path / "store", "--key-file", tmp_path / "none")


def test_what_cannot_be_used_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("log", "gc"):
        assert "no such folder" in refused(command, tmp_path / "none")
        assert "no run here" in refused(command, tmp_path / "empty")
        assert "ConfigError" in refused(command, "ftp://host/x")
        assert "is not like KEY=VALUE" in refused(command, store, "--config", "x")
    manifest = store / "one" / "manifests" / f"{3:016}.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"nnz":64', b'"nnz":65'))
    assert "ManifestInvalid: v4 is not a child of v3" in refused("log", store)


def test_a_closed_output_is_no_bug(store: Path) -> None:
    for words in (("log", store), ("gc", store, "--json")):
        done = run("sh", "-c", '"$@" >&-', "sh", *COMMAND, *words)
        assert (done.returncode, done.stderr) == (0, "")
