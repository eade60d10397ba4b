"""What `--help` shows in a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest

from deltasync.cli import COMMANDS
from tests.cli.command import COMMAND, run


def test_no_sentence_is_cut_off() -> None:
    done = run(*COMMAND, "--help", COLUMNS="80")
    assert done.returncode == 0
    listed = done.stdout.partition("Commands:\n")[2]
    assert set(re.findall(r"^  (\w+)  ", listed, re.MULTILINE)) == set(COMMANDS)
    assert "..." not in listed


@pytest.mark.parametrize("name", COMMANDS)
def test_values_are_called_by_what_they_are(name: str) -> None:
    done = run(*COMMAND, name, "--help", COLUMNS="80")
    assert done.returncode == 0
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    usage, _, rest = done.stdout.partition("\n")
    assert "list[" not in rest
    assert not re.search(r"\[\[|\{[a-z]|\[[a-z]", usage), usage
