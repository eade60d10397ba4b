"""Objects of folders, of memory and of S3: the same calls do the same, and fail by type."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasync.errors import ConfigError, ObjectDamaged, StoreRefused, StoreUnavailable
from deltasync.store.objects import Objects, StoreOptions
from tests.worlds.stores import KEYS, Place, full_disk


@pytest.fixture
def objects(place: Place) -> Objects:
    return Objects(place.url, place.options, make=True)


def test_an_object_is_put_read_listed_and_deleted(objects: Objects) -> None:
    run = objects
    run.write("a/b", lambda: [b"hello"])
    assert (run.get("a/b", max_bytes=5), run.get("a/c", max_bytes=5)) == (b"hello", None)
    assert bytes(run.get_range("a/b", 1, 3)) == b"el"
    facts = run.head("a/b")
    assert facts is not None
    assert (facts.key, facts.num_bytes, run.head("a")) == ("a/b", 5, None)
    with pytest.raises(ObjectDamaged, match="5 bytes, at most 4"):
        run.get("a/b", max_bytes=4)
    with pytest.raises(ObjectDamaged, match="ends after"):
        run.get_range("a/b", 3, 6)
    with pytest.raises(ObjectDamaged, match="does not exist"):
        run.get_range("b", 0, 1)
    for key in ("a/x/3", "a/a", "b/1"):
        run.write(key, lambda: [b"x"])
    assert sorted(one.key for one in run.listed("a")) == ["a/a", "a/b", "a/x/3"]
    assert sorted(one.key for one in run.listed("a", after="a/a")) == ["a/b", "a/x/3"]
    assert list(run.listed("c")) == []
    for _ in range(2):
        run.delete("a/b")
        assert run.get("a/b", max_bytes=5) is None


def test_large_objects_are_written_in_parts_and_not_by_half(objects: Objects) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x" * 6_000_000
        raise ZeroDivisionError

    pieces = [bytes([number]) * 3_000_000 for number in range(7)]
    objects.write("big", lambda: iter(pieces))
    assert bytes(objects.get_range("big", 5_999_990, 6_000_010)) == b"\1" * 10 + b"\2" * 10
    facts = objects.head("big")
    assert facts is not None
    assert facts.num_bytes == 21_000_000
    with pytest.raises(ZeroDivisionError):
        objects.write("half", failing)
    assert objects.head("half") is None
    assert list(objects.listed("half")) == []


def test_a_full_disk_is_refused_and_nothing_appears(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    with full_disk(100_000):
        with pytest.raises(StoreRefused, match="check space"):
            objects.create("a/b", bytes(200_000))
        with pytest.raises(StoreRefused, match="check space"):
            objects.write("a/c", lambda: iter([bytes(60_000)] * 3))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# Stores that refuse, or are not there


@pytest.mark.parametrize(
    ("url", "config", "said"),
    [
        *((url, {}, "file:///path") for url in ("", "file://", "file://host/path", "file:/path")),
        *((url, {}, url.partition(":")[0]) for url in ("ftp://host/path", "nonsense:x", "s3://")),
        ("s3://bucket/x", {"nonsense": "1"}, "nonsense"),
    ],
)
def test_what_names_no_store_is_refused(url: str, config: dict[str, str], said: str) -> None:
    """A host was taken for a folder, beside whatever the process was started in."""
    with pytest.raises(ConfigError, match=said):
        Objects(url, StoreOptions(config=config), make=True)


def test_a_bucket_that_is_not_there_is_refused_and_nobody_there_is_unavailable(s3: str) -> None:
    gone = Objects("s3://no-such-bucket/x", StoreOptions(config={"endpoint": s3, **KEYS}))
    config = {"endpoint": "http://127.0.0.1:9", **KEYS}
    nobody = Objects("s3://bucket/x", StoreOptions(config=config, retries=1, retry_timeout_s=2))
    for call in (
        lambda objects: objects.write("a", lambda: [b"1"]),
        lambda objects: objects.get("a", max_bytes=1),
        lambda objects: list(objects.listed("a")),
    ):
        with pytest.raises(StoreRefused, match="NoSuchBucket"):
            call(gone)
        with pytest.raises(StoreUnavailable, match="try again"):
            call(nobody)


@pytest.mark.parametrize(
    ("url", "config"),
    [
        ("https://127.0.0.1:9/x?sig=s3cr3t", {}),
        ("s3://bucket/x", KEYS | {"endpoint": "http://user:s3cr3t@127.0.0.1:9"}),
    ],
)
def test_secrets_of_urls_are_in_no_error(url: str, config: dict[str, str]) -> None:
    options = StoreOptions(config=config, retries=0, timeout_s=2, retry_timeout_s=2)
    with pytest.raises((ConfigError, StoreUnavailable)) as caught:
        Objects(url, options).get("a", max_bytes=1)
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": {"secret_access_key": b"s3cr3t\xff"}},
        {"mac_key": ["s3cr3t"]},
    ],
)
def test_options_that_are_secret_are_in_no_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="what it is should be") as caught:
        StoreOptions(**wrong)
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
    assert "s3cr3t" not in repr(StoreOptions(config={"secret_access_key": "s3cr3t"}))


def test_a_pipe_or_a_device_in_a_folder_is_no_object(tmp_path: Path) -> None:
    """Another user who can write there could have readers wait for ever."""
    run = Objects(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for key in ("pipe", "zero"):
        for call in (lambda key: run.get(key, max_bytes=5), lambda key: run.get_range(key, 0, 1)):
            with pytest.raises(ObjectDamaged, match="pipe or a device"):
                call(key)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in ("~/store", Path("~/other")):
        Objects(url, make=True).write("a", lambda: [b"1"])
    assert {path.name for path in tmp_path.iterdir()} == {"store", "other"}
