"""Code in README.md, CONTRIBUTING.md and docs/ runs, and the commands shown there exist.

A ```python block runs alone, in a fresh process without GPUs. The only way out is a line
`<!-- not-run: reason -->` right before it. ```bash and ```console blocks are not run: the
sub-commands and make targets that they name are looked up. docs/promises.md is that of the marks,
and figures of docs/operations.md are those of the code.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path
from urllib.parse import unquote

import pytest

import deltasync
from deltasync import ReceiverOptions, WeightSender
from deltasync.files.patch import CHUNK_NUMEL
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.verl_ends import Options
from deltasync.integrations.vllm import HttpClient
from deltasync.sync.protocol import lobby
from deltasync.sync.protocol.links import READING_S
from deltasync.sync.target import bound
from deltasync.testing.transport import TransportContract
from deltasync.transports import cuda_ipc
from deltasync.transports.control import newcomers
from deltasync.transports.sockets import SocketSender
from tests import promises
from tests.cli.command import call
from tests.worlds.programs import run

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
MAX_NOT_RUN = 7
SHELLS = {"bash", "console"}
BLOCK = re.compile(
    r"(?:<!-- not-run:([^\n]*)-->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    path: str
    line: int
    not_run: str | None
    """The reason given, perhaps empty; None for a block without the mark."""

    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def blocks() -> list[Block]:
    found = []
    pages = sorted((ROOT / "docs").rglob("*.md"))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        found += [
            Block(name, text.count("\n", 0, one.start(2)) + 1, *one.groups())
            for one in BLOCK.finditer(text)
        ]
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command: after `$ ` in a console block, any line of a bash block."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue
        yield shlex.split(line.removeprefix("$ "), comments=True)


def named(program: str, words: list[str]) -> list[str]:
    """The arguments that are no option and no assignment, if the command runs `program`."""
    words = list(dropwhile(lambda word: "=" in word, words))
    if not words or Path(words[0]).name != program:
        return []
    return [word for word in words[1:] if not word.startswith("-") and "=" not in word]


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@cache
def has_subcommand(name: str) -> bool:
    return call(name, "--help").returncode == 0


def unknown_commands(block: Block) -> list[str]:
    found = []
    for words in commands(block):
        found += [
            f"{block}: no make target {t}" for t in set(named("make", words)) - make_targets()
        ]
        for name in named("deltasync", words)[:1]:
            if not has_subcommand(name):
                found.append(f"{block}: no command deltasync {name}")
    return found


# The imports of a block have to be its own: those of the process it is forked from are forgotten.
FORGET = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "deltasync"]:
    del sys.modules[name]
runpy.run_path(sys.argv[1], run_name="__main__")
"""
RUN = [b for b in blocks() if b.language == "python" and b.not_run is None]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_python_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code, encoding="utf-8")
    environment = {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
    result = run(FORGET, script, folder=tmp_path, environment=environment)
    assert result.returncode == 0, f"{block} failed:\n{result.stderr}"


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    not_run = [block for block in blocks() if block.not_run is not None]
    assert [str(block) for block in not_run if not (block.not_run or "").strip()] == []
    assert len(not_run) <= MAX_NOT_RUN, list(map(str, not_run))


def test_commands_shown_exist() -> None:
    shells = [block for block in blocks() if block.language in SHELLS]
    found = [fault for block in shells for fault in unknown_commands(block)]
    assert not found, "\n" + "\n".join(found)


def test_code_that_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, order = text.partition("## How to read the code")
    paths = re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", order)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / "deltasync" / path).exists()] == []


@pytest.mark.skipif(not SITE.exists(), reason="make docs builds the site first")
def test_no_link_of_the_site_leads_to_a_file_that_is_not_there() -> None:
    """mkdocs says so of those in Markdown; it may be served under any path but for its 404."""
    found = []
    for page in SITE.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^":#?]+)["#?]', page.read_text(encoding="utf-8")):
            folder = SITE if link.startswith("/") else page.parent
            if not (folder / unquote(link).lstrip("/")).exists():
                found.append(f"{page.relative_to(SITE)}: {link}")
    assert not found, "\n" + "\n".join(found)


def test_the_page_of_promises_is_that_of_the_marks() -> None:
    assert promises.PAGE.read_text(encoding="utf-8") == promises.page(promises.all_marks())
    assert {mark.section for mark in promises.all_marks()} == set(promises.SECTIONS)


def test_promises_of_contracts_name_tests_that_exist() -> None:
    for mark in promises.OF_CONTRACTS:
        assert mark.test.startswith(promises.CONTRACT)
        assert hasattr(TransportContract, mark.test.removeprefix(promises.CONTRACT))


def default(call: object, name: str) -> object:
    return inspect.signature(call).parameters[name].default  # type: ignore[arg-type]


def megabytes(num_bytes: object) -> str:
    assert isinstance(num_bytes, int)
    return f"{num_bytes >> 20} MiB" if num_bytes < 1 << 30 else f"{num_bytes >> 30} GiB"


FIGURES = {
    "docs/operations.md": [
        f"pieces of {CHUNK_NUMEL:,} elements",
        f"at least {megabytes(bound._MIN_STAGED_BYTES)}",
        f"stages {megabytes(default(EngineFleet, 'max_staged_bytes'))} in each worker",
        f"steps of {megabytes(cuda_ipc._Slot.granule_bytes)}",
        f"the default is {default(WeightSender.send_weights, 'timeout_s'):.0f} unless noted",
        f"| {default(HttpClient, 'timeout_s'):.0f}: each call",
        f"| {Options.model_fields['timeout_s'].default:.0f}: each wait",
        f"{newcomers._MAX_NEWCOMERS} connections that have not greeted",
        f"{megabytes(newcomers._MAX_BYTES)} of their bytes",
        f"{default(SocketSender, 'greeting_timeout_s'):.0f} s each",
        f"{newcomers._MOMENT_S} s of a call",
        f"{newcomers._SHARE:.0%} of the time",
        f"{lobby._MAX_INCOMPLETE:,} receivers of engines",
        f"{megabytes(lobby._MAX_INCOMPLETE_BYTES)} of their greetings",
        f"{lobby._PATIENCE_S / 60:.0f} minutes each",
        f"{READING_S} s of a call, and one greeting more",
        f"{newcomers._SPARE_DESCRIPTORS} descriptors, or a quarter of the limit",
    ],
    "docs/index.md": [f"This is version {deltasync.__version__}"],
    "docs/guide.md": [f"`scrub_every` ({ReceiverOptions().scrub_every}:"],
}


@pytest.mark.promise("Security", "The figures of Operations are those of the code.")
@pytest.mark.parametrize("page", FIGURES)
def test_figures_are_those_of_the_code(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("%", " %").split())
    missing = [f for f in FIGURES[page] if f.replace("%", " %") not in text]
    assert not missing, "\n" + "\n".join(missing)
