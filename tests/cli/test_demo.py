"""`deltasync demo` from the outside: what it prints, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.command import COMMAND, call, run, run_forked, start, wait_until_gone
from tests.worlds.programs import Program

QUICK = ["demo", "--quick", "--json"]
FIELDS = {
    "version",
    "kind",
    "nnz",
    "numel",
    "density",
    "payload_bytes",
    "dense_bytes",
    "diff_s",
    "transfer_s",
    "commit_s",
    "verified",
    "reward",
}


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_json_is_one_object_a_version(transport: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_forked(*QUICK, "--steps", "2", "--transport", transport, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "equal in both processes" in done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["kind"] for record in records] == ["full", "delta", "delta"]
    for record in records:
        assert record.keys() >= FIELDS
        assert record["verified"] is True
        assert 0 <= record["reward"] <= 1
    for delta in records[1:]:
        assert 0 < delta["nnz"] < 0.3 * delta["numel"]
        assert delta["payload_bytes"] < delta["dense_bytes"]
    assert (out / "records.jsonl").read_text() == done.stdout
    assert json.loads((out / "summary.json").read_text())["before"]["num_prompts"] >= 256
    first, last = (load_file(out / f"{name}.safetensors") for name in ("first", "last"))
    changes = sum(int((last[name] != first[name]).sum()) for name in first)
    assert max(delta["nnz"] for delta in records[1:]) <= changes
    assert sum(tensor.numel() for tensor in last.values()) == records[0]["numel"]


def test_cpus_without_bf16_compute_in_fp32() -> None:
    done = run(*COMMAND, *QUICK, "--steps", "1", ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == 0, done.stderr
    assert "equal in both processes" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--lr", "nan"], "--lr"),
        (["demo", "--lr", "0"], "--lr"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--out", __file__], "--out"),
        (["demo", "--transport", "pigeon"], "--transport"),
        (["demo", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        ([], "command"),
    ],
)
def test_bad_options_get_one_line(arguments: list[str], said: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_without_typer_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from deltasync.cli import main; main()"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install typer rich")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("end", "transport", "code"),
    [
        (signal.SIGINT, "shared_memory", 130),
        (signal.SIGTERM, "shared_memory", 143),
        (signal.SIGKILL, "shared_memory", -9),
        (signal.SIGKILL, "gloo", -9),
        ("its reader leaves", "shared_memory", 141),
        ("the rollout process dies", "shared_memory", 1),
    ],
)
def test_both_processes_end_quietly_however_it_ends(
    end: signal.Signals | str, transport: str, code: int
) -> None:
    with running_demo(transport) as (trainer, rollout):
        if end == "its reader leaves":
            trainer.stdout.close()
        elif end == "the rollout process dies":
            os.kill(rollout, signal.SIGKILL)
        else:
            trainer.send_signal(int(end))
        errors = trainer.stderr.read()  # until both have closed it
        assert "Traceback" not in errors
        assert trainer.wait(timeout=60) == code
        *_, last = errors.splitlines()
        assert bool(re.match(r"[A-Z]\w+: ", last)) == (code == 1), last  # it says why
        wait_until_gone(rollout)


@contextmanager
def running_demo(transport: str = "shared_memory") -> Iterator[tuple[Program, int]]:
    """A demo past its first delta, and the id of its rollout process."""
    folder = tempfile.TemporaryDirectory()  # a killed trainer cannot clean up after itself
    words = [*QUICK, "--steps", "1000000", "--transport", transport]
    trainer = start(*words, TMPDIR=folder.name)
    try:
        for _ in range(2):
            assert trainer.stdout.readline()
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        (rollout,) = map(int, children)
        yield trainer, rollout
    finally:
        trainer.kill()
        trainer.wait()
        folder.cleanup()
        trainer.close()


def test_a_store_has_every_version_bit_for_bit(tmp_path: Path) -> None:
    """Read in processes of their own; also without the newest delta, and by one who comes late."""
    out, store = tmp_path / "out", tmp_path / "store"
    done = run_forked(*QUICK, "--steps", "4", "--out", out, "--store", store)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    told = json.loads(run(*COMMAND, "log", store, "--json").stdout)
    assert [one["version"] for one in told["versions"]] == [5, 4, 3, 2, 1]
    digests = [record["store"]["digest"] for record in records]
    assert [one["digest"] for one in told["versions"]] == digests[::-1]
    ends = {1: "first", 5: "last"}
    for to in range(1, 6):
        made = tmp_path / f"v{to}"
        done = call("fetch", store, "--to", f"v{to}", "--out", made, "--json")
        assert json.loads(done.stdout)["digest"] == digests[to - 1], done
        if to in ends:
            file = out / f"{ends[to]}.safetensors"
            assert call("verify", file, made, "--ignore-missing").returncode == 0
    (newest,) = store.glob("*/objects/*5-delta-*")
    newest.unlink()
    assert call("fetch", store, "--out", tmp_path / "none").returncode == 2
    base, late = tmp_path / "v2", tmp_path / "late"
    assert call("fetch", store, "--to", "v4", "--base", base, "--out", late).returncode == 0
    assert call("verify", late, tmp_path / "v4").returncode == 0
