"""Code in README.md, CONTRIBUTING.md and docs/ runs, and the commands shown there exist.

A ```python block runs alone, in a fresh process without GPUs. The only way out is a line
`<!-- not-run: reason -->` right before it. ```bash and ```console blocks are not run: the
sub-commands and make targets that they name are looked up. docs/promises.md is that of the marks,
and figures of docs/operations.md are those of the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from itertools import dropwhile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import deltasync
from deltasync import ReceiverOptions, WeightSender
from deltasync.delta.patch import CHUNK_NUMEL
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.verl_ends import Options
from deltasync.integrations.vllm import HttpClient
from deltasync.sync.protocol import lobby
from deltasync.sync.protocol.links import _READING_S
from deltasync.sync.target import bound
from deltasync.testing.transport import TransportContract
from deltasync.transports import cuda_ipc
from deltasync.transports.control import endpoints
from deltasync.transports.control.endpoints import Server
from tests import promises
from tests.cli.command import call
from tests.worlds.programs import run

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
MAX_NOT_RUN = 7
SHELLS = {"bash", "console"}
PROSE = {"diff", "json", "make", "mermaid", "text", "toml", "yaml"}
LANGUAGES = {"python"} | SHELLS | PROSE

FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<ticks>```+|~~~+)(?P<info>.*)$")
NOT_RUN = re.compile(r"^[ >]*<!-- not-run:(?P<reason>.*)-->\s*$")
PYTHON_LINE = re.compile(r"^\s*(>>> |import deltasync|from deltasync)")


@dataclass(frozen=True)
class Block:
    path: str
    line: int
    language: str
    code: str
    not_run: str | None = None
    """The reason given, perhaps empty; None for a block without the mark."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def collect(text: str, path: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text; `line` is that of the opening fence."""
    lines = text.splitlines()
    start, end = 0, 0
    while start < len(lines):
        opening = FENCE.match(lines[start])
        if opening:
            end = closing_line(lines, start, opening["ticks"])
            mark = NOT_RUN.match(lines[start - 1]) if start else None
            body = (line.removeprefix(opening["indent"]) for line in lines[start + 1 : end])
            yield Block(
                path=path,
                line=start + 1,
                language=opening["info"].strip(),
                code=textwrap.dedent("\n".join(body)) + "\n",
                not_run=mark["reason"].strip() if mark else None,
            )
            start = end
        start += 1


def closing_line(lines: list[str], start: int, ticks: str) -> int:
    for number in range(start + 1, len(lines)):
        bare = lines[number].strip(" >")
        if bare.startswith(ticks) and not bare.strip(ticks[0]):
            return number
    raise AssertionError(f"the block opened on line {start + 1} is never closed")


def outside_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that belong to no fenced block."""
    fenced: set[int] = set()
    for block in collect(text, ""):
        fenced.update(range(block.line, block.line + block.code.count("\n") + 2))
    for number, line in enumerate(text.splitlines(), start=1):
        if number not in fenced:
            yield number, line


def documents() -> list[Path]:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in paths if path.exists()]


def blocks() -> list[Block]:
    return [
        block
        for path in documents()
        for block in collect(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]


def escapes(text: str, path: str) -> list[str]:
    """Code that could be Python and would not be run: every one is a fault of the document."""
    found = []
    for block in collect(text, path):
        if block.language not in LANGUAGES:
            found.append(f"{block}: language {block.language!r}, not one of {sorted(LANGUAGES)}")
        elif block.language in PROSE and any(map(PYTHON_LINE.match, block.code.splitlines())):
            found.append(f"{block}: Python in a {block.language} block")
    for number, line in outside_blocks(text):
        if PYTHON_LINE.match(line):
            found.append(f"{path}:{number}: Python outside a fenced block")
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


EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_do_not_hide_what_they_import(example: Path) -> None:
    """A script's own folder comes first where Python looks for packages."""
    roots = set()
    for node in ast.walk(ast.parse(example.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    assert roots.isdisjoint(path.stem for path in EXAMPLES)


def test_the_trainer_of_another_machine_says_what_it_wants() -> None:
    """Its options are those of the page; tests/engines runs it where vLLM is."""
    result = run(ROOT / "docs" / "examples" / "vllm_remote.py", "--help")
    assert result.returncode == 0, result.stderr
    page = (ROOT / "docs" / "integrations" / "remote.md").read_text(encoding="utf-8")
    used = set(re.findall(r"--(?:host|port|backend|out)\b", page))
    assert used == {"--host", "--port", "--backend", "--out"}
    assert all(option in result.stdout for option in used)


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    not_run = [block for block in blocks() if block.not_run is not None]
    assert [str(block) for block in not_run if not block.not_run] == []
    assert len(not_run) <= MAX_NOT_RUN, list(map(str, not_run))


def test_no_python_escapes_collection() -> None:
    found = [
        fault
        for path in documents()
        for fault in escapes(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n" + "\n".join(found)


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
    _, _, finding = order.partition("| to find | look at |")
    names = re.findall(r"`(?:(\w+)\.)?(\w+)`", finding.split("\n\n")[0])
    assert len(names) > 10
    package = [path.read_text(encoding="utf-8") for path in (ROOT / "deltasync").rglob("*.py")]
    assert [pair for pair in names if not any(defines(text, *pair) for text in package)] == []


def defines(text: str, of: str, name: str) -> bool:
    """Whether a module has `name`, in a class `of` if that is not empty."""
    wanted = [rf"class {of}\b"] if of else []
    wanted.append(rf"(?:class|def) {name}\b|{name} = ")
    return all(re.search(rf"^\s*(?:{one})", text, re.MULTILINE) for one in wanted)


class Page(HTMLParser):
    """Links of a page, and what others can link to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and key in ("href", "src"):
                self.links.append(value)
            elif value and key in ("id", "name"):
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Those inside the site that lead nowhere. It may be served under any path but for its 404."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            folder = site if url.path.startswith("/") else path.parent
            target = (folder / unquote(url.path).lstrip("/")).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (url.fragment and unquote(url.fragment) not in anchors):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


@pytest.mark.skipif(not SITE.exists(), reason="make docs builds the site first")
def test_no_link_of_the_site_is_broken() -> None:
    found = broken_links(SITE)
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
        f"steps of {megabytes(cuda_ipc._GRANULE_BYTES)}",
        f"the default is {default(WeightSender.send_weights, 'timeout_s'):.0f} unless noted",
        f"| {default(HttpClient, 'timeout_s'):.0f}: each wait",
        f"| {Options.model_fields['timeout_s'].default:.0f}: each wait",
        f"{endpoints._MAX_NEWCOMERS} connections that have not greeted",
        f"{megabytes(endpoints._MAX_BYTES)} of their bytes",
        f"{default(Server, 'greeting_timeout_s'):.0f} s each",
        f"{endpoints._MOMENT_S} s of a call",
        f"{endpoints._SHARE:.0%} of the time",
        f"{lobby._MAX_INCOMPLETE:,} receivers of engines",
        f"{megabytes(lobby._MAX_INCOMPLETE_BYTES)} of their greetings",
        f"{lobby._PATIENCE_S / 60:.0f} minutes each",
        f"{lobby._CATCH_UP_S + _READING_S:.1f} s of a call, and one greeting more",
        f"{endpoints._SPARE_DESCRIPTORS} descriptors, or a quarter of the limit",
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
