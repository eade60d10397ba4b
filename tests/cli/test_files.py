"""`deltasync diff`, `apply` and `verify` from the outside."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest
import torch

from deltasync.files.checkpoint import Checkpoint
from deltasync.files.patch_file import write_patch
from tests.cli.command import COMMAND, ENVIRONMENT, call, refused, run_forked, told
from tests.files.saved import holds, model, save, save_sharded, stepped
from tests.worlds.programs import run as run_program
from tests.worlds.strategies import same_bits

UP = "model.layers.0.up.weight"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return save(model(), tmp_path / "old.safetensors")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return save(stepped(model()), tmp_path / "new.safetensors")


@pytest.fixture
def patch(old: Path, new: Path, tmp_path: Path) -> Path:
    write_patch(Checkpoint(old), Checkpoint(new), tmp_path / "step.patch")
    return tmp_path / "step.patch"


def nnz() -> int:
    pairs = zip(model().values(), stepped(model()).values(), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


def test_diff_then_apply_then_verify(tmp_path: Path) -> None:
    old = save_sharded(model(), tmp_path / "old")
    new = save_sharded(stepped(model()), tmp_path / "new", files=3)
    found = told("diff", old, new, "--out", tmp_path / "patch")
    assert found["changed"] == sum(found["steps"]) == found["steps"][1] == nnz()
    assert found["patch"]["bytes"] == (tmp_path / "patch").stat().st_size
    made = told("apply", tmp_path / "patch", old, "--out", tmp_path / "made")
    assert made["digest"] == found["patch"]["digest"]
    assert holds(tmp_path / "made", stepped(model()))
    assert told("verify", new, tmp_path / "made")["equal"]
    assert told("verify", new, tmp_path / "made", "--digest")["digests"] == [made["digest"]] * 2


def test_diff_shows_some_of_many_tensors_and_layers_unless_asked_for_all(tmp_path: Path) -> None:
    many = {f"layers.{n}.w": torch.full((4,), n, dtype=torch.bfloat16) for n in range(250)}
    files = [
        save({name: w + add for name, w in many.items()}, tmp_path / f"{add}.safetensors")
        for add in (0, 300)
    ]
    some = call("diff", *files).stdout
    assert "and 50 more layers: --tensors shows all" in some
    assert "and 240 less dense: --tensors shows all" in some
    everything = call("diff", *files, "--tensors").stdout
    assert "shows all" not in everything
    assert all(f" layers.{n} " in everything for n in range(250))
    assert all(f" {name} " in everything for name in many)


def test_diff_counts_by_layer_and_by_tensor(old: Path, new: Path) -> None:
    found = told("diff", old, new)
    assert set(found["layers"]) == {"model.layers.0", "model.layers.1", "mask", "scale", "none"}
    layer = found["layers"]["model.layers.0"]
    parts = [found["tensors"][f"model.layers.0.{name}.weight"] for name in ("up", "down")]
    assert layer["changed"] == sum(part["changed"] for part in parts) > 0
    assert layer["density"] == layer["changed"] / layer["numel"]
    assert found["encodings"] == {
        "dense": sum(tensor.nbytes for tensor in model().values()),
        "int32 + value": 6 * nnz(),
    }


def test_diff_of_encodings_agrees_with_that_of_counts(old: Path, new: Path) -> None:
    plain = ["diff", str(old), str(new)]
    few, many = (told(*diff)["encodings"] for diff in (plain, [*plain, "--encodings"]))
    assert many["int32 + value"] == few["int32 + value"]
    assert many["dense"] == few["dense"]
    assert any("zstd" in name for name in many)


def test_diff_shows_what_it_found(old: Path, new: Path) -> None:
    text = call("diff", old, new).stdout
    assert f"{nnz():,} of" in text
    for word in ("model.layers.1", UP, "step in ULP", "128 and more", "int32 + value"):
        assert word in text


def test_equal_checkpoints_have_no_difference(old: Path, tmp_path: Path) -> None:
    found = told("diff", old, old, "--out", tmp_path / "patch")
    assert found["changed"] == 0
    told("apply", tmp_path / "patch", old, "--out", tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == old.read_bytes()
    assert call("diff", old, old).stdout.startswith("0 of")


def test_verify_names_the_first_differing_elements(old: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in model().items()}
    tensors[UP][3, 17] = -0.0
    model()[UP].view(torch.int16)
    tensors["scale"].view(torch.int32).fill_(0x7FC00001)
    other = save(tensors, tmp_path / "other")
    done = call("verify", old, other, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["different"] == {UP: 1, "scale": 1}
    first, second = found["first"]
    assert (first["name"], first["index"]) == (UP, [3, 17])
    assert first["old"] == [str(model()[UP][3, 17].item()), hex_of(model()[UP][3, 17])]
    assert first["new"] == ["-0.0", "0x8000"]
    assert (second["index"], second["new"]) == ([], ["nan", "0x7fc00001"])
    text = call("verify", old, other).stdout
    assert "different: 2 of" in text
    assert "[3, 17]" in text
    assert "0x7fc00001" in text


def hex_of(element: torch.Tensor) -> str:
    return f"0x{int(element.view(torch.int16)) & 0xFFFF:04x}"


def test_verify_shows_as_many_as_asked_for(old: Path, new: Path) -> None:
    found = json.loads(call("verify", old, new, "--limit", "3", "--json").stdout)
    assert len(found["first"]) == 3
    assert sum(found["different"].values()) == nnz()


def test_verify_by_digest(old: Path, new: Path) -> None:
    done = run_forked("verify", old, new, "--digest")
    assert done.returncode == 1
    digests = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(set(digests)) == 2
    assert all(len(digest) == 16 for digest in digests)


def renamed(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def test_tensors_are_chosen_and_renamed_before_they_are_compared(
    old: Path, new: Path, tmp_path: Path
) -> None:
    other = save(renamed(stepped(model()), "module."), tmp_path / "other")
    chosen = ["--rename", "module.=", "--only", "model.layers.0.*", "--only", "mask"]
    found = told("diff", old, other, *chosen)
    part = {n: f for n, f in told("diff", old, new)["tensors"].items() if "layers.0" in n}
    mask = found["tensors"].pop("mask")
    assert (mask["changed"], found["tensors"]) == (0, part)
    for by in ([], ["--digest"]):
        assert told("verify", new, other, "--rename", "module.=", *by)["equal"]
        assert told("verify", new, other, *chosen, *by)["equal"]
    assert "none of its" in refused("verify", new, other, *chosen[2:])
    assert "is not like OLD=NEW" in refused("verify", new, other, "--rename", "module")
    assert "none of its" in refused("diff", old, new, "--only", "nothing*")
    both = ["--rename", "model.layers.0=x", "--rename", "model.layers.1=x"]
    assert "two tensors are to be called" in refused("diff", old, new, *both)
    out = ["--out", str(tmp_path / "patch")]
    assert "a patch is of all tensors" in refused("diff", old, new, "--only", "mask", *out)


def test_tensors_that_one_lacks_are_left_out_if_asked_for(old: Path, tmp_path: Path) -> None:
    fewer = save({n: t for n, t in model().items() if n != UP}, tmp_path / "fewer")
    assert UP in refused("diff", old, fewer)
    done = call("verify", old, fewer, "--ignore-missing")
    assert done.returncode == 0
    assert done.stdout.startswith("equal: ")
    assert done.stderr == f"left out, as only one has them: {UP!r}\n"


def test_pickles_are_named_as_such_with_the_way_on(old: Path, tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3)}
    folder = tmp_path / "hub"
    folder.mkdir()
    torch.save(tensors, tmp_path / "w.pt")
    torch.save(tensors, tmp_path / "unnamed")
    torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save(tensors, folder / "pytorch_model.bin")
    for pickled in ("w.pt", "unnamed", "old.bin", "hub"):
        line = refused("diff", old, tmp_path / pickled)
        assert "a pickle" in line
        assert "safetensors.torch.save_file(torch.load(" in line


def test_the_sign_of_zero_and_payloads_of_nan_are_differences(tmp_path: Path) -> None:
    bits = torch.tensor([0x0000, 0x7FC0, 0x7F81], dtype=torch.int16)
    others = torch.tensor([-0x8000, 0x7FC1, 0x7F82], dtype=torch.int16)
    old = save({"a": bits.view(torch.bfloat16)}, tmp_path / "old")
    new = save({"a": others.view(torch.bfloat16)}, tmp_path / "new")
    assert told("diff", old, new, "--out", tmp_path / "patch")["changed"] == 3
    done = run_forked("apply", tmp_path / "patch", old, "--out", tmp_path / "made", "--json")
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert same_bits(Checkpoint(tmp_path / "made").tensor("a"), others.view(torch.bfloat16))


def test_verify_finds_a_sound_patch_file(patch: Path) -> None:
    size = patch.stat().st_size
    assert told("verify", patch) == {"bytes": size, "frames": 5, "fault": None}
    assert re.match(r"patch file, .* kB, 5 sound frames\n$", call("verify", patch).stdout)


def test_verify_says_what_is_damaged_and_where(patch: Path) -> None:
    patch.write_bytes(patch.read_bytes()[:-1])
    done = call("verify", patch, "--json")
    assert done.returncode == 1
    fault = json.loads(done.stdout)["fault"]
    assert fault["error"] == "TruncatedFrame"
    text = call("verify", patch).stdout
    assert f"damaged frame at byte {fault['offset']:,}: TruncatedFrame: {fault['reason']}" in text


def test_bad_input_gets_one_line_and_a_code(
    old: Path, new: Path, patch: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", save({"a": torch.ones(3)}, tmp_path / "other")
    cut = tmp_path / "cut"
    cut.write_bytes(patch.read_bytes()[:-1])
    assert "No such file" in refused("diff", old, tmp_path / "gone")
    assert "exists" in refused("diff", old, new, "--out", new)
    assert "only the first has" in refused("verify", old, other)
    assert "exists" in refused("apply", patch, old, "--out", new)
    assert "deltasync verify FILE" in refused("apply", cut, old, "--out", out)
    assert "made from" in refused("apply", patch, new, "--out", out, code=1)
    assert "give a second one" in refused("verify", old)
    assert not out.exists()
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused("verify", tmp_path / "pipe")
    assert "name too long" in refused("diff", old, new, "--out", tmp_path / ("x" * 300))


def diff_into(out: IO[str] | int, old: Path, new: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "diff", old, new],
        env=ENVIRONMENT,
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )


def test_output_that_cannot_be_written_gets_one_line(old: Path, new: Path) -> None:
    with open("/dev/full", "w") as full:
        done = diff_into(full, old, new)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([0, 1 << 63], "multiply to more than"),
        ([1 << 62, 0, 3], "multiply to more than"),
        ([0] * 65, "65 dimensions"),
    ],
)
def test_what_no_message_could_carry_is_no_checkpoint(
    shape: list[int], words: str, tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"w": entry}).encode()
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(len(header).to_bytes(8, "little") + header)
    for command in (["verify", "--digest"], ["verify"], ["diff"]):
        line = refused(*command, odd, odd)
        assert "'w'" in line
        assert words in line


def test_an_empty_tensor_of_the_largest_size_is_equal_to_itself(tmp_path: Path) -> None:
    large = save({"w": torch.empty(0, 1 << 62)}, tmp_path / "large")
    assert told("verify", large, large, "--digest")["equal"]


def test_an_internal_error_has_a_code_of_its_own(old: Path, patch: Path, tmp_path: Path) -> None:
    change = "checkpoint.Checkpoint.flush = lambda *_: [][1]"
    done = changed_apply(change, patch, old, tmp_path / "out")
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.splitlines()[-1] == "IndexError: list index out of range"
    change = "checkpoint.Checkpoint.flush = lambda *_: bytearray(1 << 62)"
    done = changed_apply(change, patch, old, tmp_path / "out")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "not enough memory" in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_safetensors_it_says_what_to_install(old: Path) -> None:
    code = "import sys; sys.modules['safetensors'] = None; from deltasync.cli import main; main()"
    done = run_program(code, "verify", old, old, environment=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install safetensors")
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_coloured_when_piped(old: Path, new: Path, patch: Path) -> None:
    for arguments in (("diff", str(old), str(new)), ("verify", str(patch))):
        done = run_forked(*arguments, COLORTERM="truecolor", TERM="xterm-256color")
        assert "\x1b" not in done.stdout + done.stderr
        assert done.stderr == ""


def test_a_terminal_of_80_columns_is_enough(old: Path, new: Path, patch: Path) -> None:
    for arguments in (("diff", str(old), str(new)), ("verify", str(patch))):
        text = in_terminal([*COMMAND, *arguments])
        assert max(map(len, text.splitlines())) <= 80


def in_terminal(command: list[str]) -> str:
    """What a command writes to a terminal of 80 columns, without its escapes."""
    leader, follower = pty.openpty()
    environment = ENVIRONMENT | {"TERM": "dumb", "COLUMNS": "80", "NO_COLOR": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=follower, stderr=subprocess.DEVNULL
    ) as process:
        os.close(follower)
        data = b""
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # the other end was closed
                break
            if not part:
                break
            data += part
        process.wait(timeout=100)
    os.close(leader)
    return data.decode()


ODD = {  # and how they are shown
    "[red]a[/red]": "[red]a[/red]",
    "[/b]": "[/b]",
    ":smile:": ":smile:",
    "\x1b[2J\x1b]0;c\x07": r"\x1b[2J\x1b]0;c\x07",
    "d\r\nequal: all": r"d\r\nequal: all",
    "e\u202e\x9b": r"e\u202e\x9b",
}


def test_odd_names_are_shown_as_they_are_and_not_obeyed(tmp_path: Path) -> None:
    old = save(dict.fromkeys(ODD, torch.zeros(3)), tmp_path / "\x1b[31m")
    new = save(dict.fromkeys(ODD, torch.ones(3)), tmp_path / "[b]new")
    patch, made = tmp_path / "\udcff", tmp_path / "[b]\x1b[2J"
    write_patch(Checkpoint(old), Checkpoint(new), patch)
    for arguments in (["diff", old, new], ["verify", old, new, "--limit", 99]):
        words = list(map(str, arguments))
        for text in (call(*words).stdout, in_terminal([*COMMAND, *words])):
            assert is_harmless(text)
            assert all(shown in text for shown in ODD.values())
    for shown, text in (
        (r"\x1b[31m", call("verify", old, new, "--digest").stdout),
        (r"[b]\x1b[2J", call("apply", patch, old, "--out", made).stdout),
        (r"[b]\x1b[2J", refused("diff", old, new, "--out", made)),
        (r"\udcff", refused("diff", old, new, "--out", patch)),
        (r"\x1b[2J", refused("verify", patch, "--\x1b[2J")),
    ):
        assert is_harmless(text)
        assert shown in text


def is_harmless(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text.replace("\r\n", "\n"))


def test_a_reader_that_leaves_ends_it_quietly(old: Path, new: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = diff_into(write, old, new)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signals_leave_nothing(
    number: int, code: int, old: Path, patch: Path, tmp_path: Path
) -> None:
    there = set(tmp_path.iterdir())
    kill = f"lambda *_: os.kill(os.getpid(), {number})"
    done = changed_apply(f"checkpoint.Checkpoint.flush = {kill}", patch, old, tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert set(tmp_path.iterdir()) == there


def test_a_second_sigterm_does_not_keep_the_first_from_clearing_away(
    old: Path, patch: Path, tmp_path: Path
) -> None:
    there = set(tmp_path.iterdir())
    change = """
kill, remove = lambda *_: os.kill(os.getpid(), 15), output.shutil.rmtree
checkpoint.Checkpoint.flush = kill
output.shutil.rmtree = lambda folder, **how: (kill(), remove(folder, **how))
"""
    done = changed_apply(change, patch, old, tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    assert set(tmp_path.iterdir()) == there


def changed_apply(
    change: str, patch: Path, old: Path, out: Path
) -> subprocess.CompletedProcess[str]:
    """`deltasync apply`, of which something was changed."""
    code = (
        f"import os; from deltasync.files import checkpoint, output\n{change}\n"
        "from deltasync.cli import main; main()"
    )
    return run_program(code, "apply", patch, old, "--out", out, environment=ENVIRONMENT)
