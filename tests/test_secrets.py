"""Files with secrets: one reader for all, which takes what `echo` and random bytes leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltasync.config import read_secret
from deltasync.errors import ConfigError

RANDOM = bytes(range(246, 256)) + b"\n"


@pytest.mark.parametrize(
    ("data", "secret"),
    [
        (b"hello\n", b"hello"),
        (b"hello\r\n", b"hello"),
        (b" of two words \n", b" of two words "),
        ("gr\u00fcn\n".encode(), "gr\u00fcn".encode()),
        (RANDOM, RANDOM),
        (b"-----\nkey\n-----\n", b"-----\nkey\n-----\n"),
    ],
)
def test_a_line_of_text_counts_without_its_break_and_anything_else_as_it_is(
    tmp_path: Path, data: bytes, secret: bytes
) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    assert read_secret(path) == secret


def test_a_file_that_is_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\n")
    with pytest.raises(ConfigError, match="key is empty"):
        read_secret(tmp_path / "key")
