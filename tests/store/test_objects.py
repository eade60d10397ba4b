"""Objects of folders, of memory and of S3: the same calls do the same, and fail by type."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasync.errors import ConfigError, ObjectDamaged, StoreRefused, StoreUnavailable
from deltasync.store.objects import Objects, StoreOptions
from tests.worlds.stores import KEYS, Place, s3_place


def objects_of(place: Place) -> Objects:
    return Objects(place.url, place.options, make=True)


def test_an_object_is_put_and_read(place: Place) -> None:
    run = objects_of(place).under("run")
    run.put("a/b", b"hello")
    assert run.get("a/b", max_bytes=5) == b"hello"
    assert run.get("a/c", max_bytes=5) is None
    assert bytes(run.get_range("a/b", 1, 3)) == b"el"
    assert bytes(run.get_range("a/b", 2, 2)) == b""
    facts = run.head("a/b")
    assert facts is not None
    assert (facts.key, facts.num_bytes) == ("a/b", 5)
    assert run.head("a") is None


def test_larger_than_expected_is_damaged(place: Place) -> None:
    run = objects_of(place)
    run.put("a", b"hello")
    with pytest.raises(ObjectDamaged, match="5 bytes, at most 4"):
        run.get("a", max_bytes=4)


@pytest.mark.parametrize(("start", "stop"), [(3, 6), (5, 9), (7, 9)])
def test_a_range_beyond_the_end_is_damaged(place: Place, start: int, stop: int) -> None:
    run = objects_of(place)
    run.put("a", b"hello")
    with pytest.raises(ObjectDamaged, match="ends after"):
        run.get_range("a", start, stop)
    with pytest.raises(ObjectDamaged, match="does not exist"):
        run.get_range("b", 0, 1)


def test_a_pipe_or_a_device_in_a_folder_is_no_object(tmp_path: Path) -> None:
    """Another user who can write there could have readers wait for ever."""
    run = Objects(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for key in ("pipe", "zero"):
        with pytest.raises(ObjectDamaged, match="pipe or a device"):
            run.get(key, max_bytes=5)
        with pytest.raises(ObjectDamaged, match="pipe or a device"):
            run.get_range(key, 0, 1)
    (tmp_path / "file").write_bytes(b"hello")
    (tmp_path / "link").symlink_to("file")
    assert run.get("link", max_bytes=5) == b"hello"
    assert run.get("nothing", max_bytes=5) is None


def test_what_is_deleted_while_it_is_written_is_no_loss_of_types(tmp_path: Path) -> None:
    run, stop = Objects(tmp_path), threading.Event()

    def delete() -> None:
        while not stop.is_set():
            run.delete("a/b")

    thread = threading.Thread(target=delete)
    thread.start()
    failures = 0
    try:
        for number in range(4000):
            try:
                run.put("a/b", b"hello")
            except StoreUnavailable:
                failures += 1
            if failures and number > 500:
                break
    finally:
        stop.set()
        thread.join(timeout=30)
    assert failures


def test_who_comes_first_creates(place: Place) -> None:
    run = objects_of(place)
    assert run.create("a/one", b"mine")
    assert run.create("a/one", b"mine"), "an answer may have been lost"
    assert not run.create("a/one", b"yours")
    assert run.get("a/one", max_bytes=9) == b"mine"


def test_lists_have_what_is_below(place: Place) -> None:
    run = objects_of(place).under("run")
    for key in ("a/2", "a/1", "a/x/3", "b/1"):
        run.put(key, b"x")
    assert sorted(facts.key for facts in run.listed("a")) == ["a/1", "a/2", "a/x/3"]
    assert sorted(facts.key for facts in run.listed("a", after="a/1")) == ["a/2", "a/x/3"]
    assert list(run.listed("c")) == []
    assert run.folders() == ["a", "b"]
    assert objects_of(place).folders() == ["run"]


def test_what_is_deleted_is_gone(place: Place) -> None:
    run = objects_of(place)
    run.put("a", b"x")
    run.delete("a")
    run.delete("a")
    assert run.get("a", max_bytes=1) is None


def test_large_objects_are_written_in_parts(place: Place) -> None:
    run = objects_of(place)
    pieces = [bytes([number]) * 3_000_000 for number in range(7)]
    run.write("big", lambda: iter(pieces))
    whole = b"".join(pieces)
    assert bytes(run.get_range("big", 5_999_990, 6_000_010)) == whole[5_999_990:6_000_010]
    facts = run.head("big")
    assert facts is not None
    assert facts.num_bytes == len(whole)


def test_what_fails_half_way_does_not_appear(place: Place) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 6_000_000
        raise ZeroDivisionError

    run = objects_of(place)
    with pytest.raises(ZeroDivisionError):
        run.write("half", pieces)
    assert run.get("half", max_bytes=1 << 30) is None
    assert list(run.listed("half")) == []


def test_memories_are_found_by_name() -> None:
    Objects("memory://one").put("a", b"1")
    assert Objects("memory://one").get("a", max_bytes=1) == b"1"
    assert Objects("memory://two").get("a", max_bytes=1) is None


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="no such folder"):
        Objects(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("url", ["ftp://host/path", "nonsense:x", "s3://"])
def test_unknown_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=url.split(":")[0]):
        Objects(url)


@pytest.mark.parametrize("url", ["", "file://", "file://host/path", "file:/path", "FILE:///path"])
def test_a_folder_is_named_in_one_way(tmp_path: Path, url: str) -> None:
    """A host was taken for a folder, beside whatever the process was started in."""
    with pytest.raises(ConfigError, match="file:///path"):
        Objects(url, make=True)
    objects = Objects(f"file://{tmp_path}/a%20b", make=True)
    assert objects.folder == tmp_path / "a%20b"


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        Objects("s3://bucket/x", StoreOptions(config={"nonsense": "1"}))


def test_options_at_which_obstore_panics_are_refused() -> None:
    with pytest.raises(ConfigError, match="allow_http"):
        Objects("s3://bucket/x", StoreOptions(config={"allow_http": "true"}))


def test_a_bucket_that_is_not_there_is_refused(s3: str) -> None:
    options = StoreOptions(config={"endpoint": s3, **KEYS})
    objects = Objects("s3://no-such-bucket/x", options)
    for call in (
        lambda: objects.put("a", b"1"),
        lambda: objects.get("a", max_bytes=1),
        lambda: list(objects.listed("a")),
    ):
        with pytest.raises(StoreRefused, match="NoSuchBucket"):
            call()


def test_nobody_there_is_unavailable_soon() -> None:
    config = {"endpoint": "http://127.0.0.1:9", **KEYS}
    objects = Objects("s3://bucket/x", StoreOptions(config=config, retries=1, retry_timeout_s=2))
    for call in (
        lambda: objects.put("a", b"1"),
        lambda: objects.create("a", b"1"),
        lambda: objects.get("a", max_bytes=1),
        lambda: objects.get_range("a", 0, 1),
        lambda: objects.head("a"),
        lambda: list(objects.listed("a")),
        lambda: objects.write("a", lambda: iter([b"1"])),
        lambda: objects.delete("a"),
    ):
        with pytest.raises(StoreUnavailable, match="try again"):
            call()


_FULL = """
import resource, sys
from deltasync.errors import StoreRefused
from deltasync.store.objects import Objects
objects = Objects(sys.argv[1], make=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for call in (
    lambda: objects.put("a/b", bytes(200_000)),
    lambda: objects.write("a/c", lambda: iter([bytes(60_000)] * 3)),
):
    try:
        call()
    except StoreRefused as error:
        assert "File too large" in str(error) and "check space" in str(error), error
    else:
        raise AssertionError
assert [facts.key for facts in objects.listed("a")] == []
"""


def test_a_full_disk_is_refused_and_nothing_appears(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0
    subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], check=True, timeout=60)
    found = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert found == []


@pytest.mark.parametrize(
    ("url", "config"),
    [
        ("http://user:s3cr3t@127.0.0.1:9/x", {}),
        ("https://127.0.0.1:9/x?sig=s3cr3t", {}),
        ("ftp://user:s3cr3t@127.0.0.1/x", {}),
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
        {"config": "s3cr3t"},
        {"mac_key": ["s3cr3t"]},
    ],
)
def test_options_that_are_secret_are_in_no_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="what it is should be") as caught:
        StoreOptions(**wrong)
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
    assert "s3cr3t" not in repr(StoreOptions(config={"secret_access_key": "s3cr3t"}))


def test_objects_are_reached_where_no_thread_can_start(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.12 has it within `atexit`, and a machine without memory for one more stack."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    objects = objects_of(s3_place(s3))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert objects.create("a", b"hello")
    assert objects.get("a", max_bytes=5) == b"hello"
    assert [facts.key for facts in objects.listed("")] == ["a"]
    objects.delete("a")
    assert objects.head("a") is None
