"""Files with secrets: one reader for all, which takes what `echo` and random bytes leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from deltasync import ModuleSource, SenderOptions, StoreOptions, StoreSender
from deltasync.config import read_secret
from deltasync.errors import ConfigError
from tests.cli.command import call, refused

RANDOM = bytes(range(246, 256)) + b"\n"


@pytest.mark.parametrize(
    ("data", "secret"),
    [
        (b"hello", b"hello"),
        (b"hello\n", b"hello"),
        (b"hello\r\n", b"hello"),
        (b" of two words \n", b" of two words "),
        ("gr\u00fcn\n".encode(), "gr\u00fcn".encode()),
        (RANDOM, RANDOM),
        (b"\x00\n", b"\x00\n"),
        (b"-----\nkey\n-----\n", b"-----\nkey\n-----\n"),
    ],
)
def test_a_line_of_text_counts_without_its_break_and_anything_else_as_it_is(
    tmp_path: Path, data: bytes, secret: bytes
) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    assert read_secret(path) == secret
    StoreSender(
        ModuleSource(nn.Linear(2, 2)),
        tmp_path / "store",
        options=SenderOptions(stream_id="run"),
        store=StoreOptions.model_validate({"mac_key": secret}),
    ).publish()
    assert call("log", tmp_path / "store", "--key-file", path).returncode == 0


@pytest.mark.parametrize("words", [("log", "store", "--key-file"), ("export", "--secret")])
def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    if words[0] == "export":
        out = str(tmp_path / "out")
        words = ("export", "gloo://127.0.0.1:1", "--out", out, words[1])
    path = tmp_path / "key"
    assert f"{path}: No such file" in refused(*words, path)
    path.write_bytes(b"\n")
    assert f"{path} is empty" in refused(*words, path)
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(str(path))
