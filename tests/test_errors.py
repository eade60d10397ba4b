"""Errors show no secret, arrive in other processes, and are all in the runbook."""

from __future__ import annotations

import inspect
import pickle
from copy import copy
from pathlib import Path

import pytest

from deltasync import errors
from deltasync.config import network_secret
from deltasync.errors import ConfigError, PeerLost, StoreRefused, TransportTimeout, redacted

ROOT = Path(__file__).parents[1]


def defined_classes() -> list[type]:
    members = vars(errors).values()
    return [c for c in members if inspect.isclass(c) and c.__module__ == errors.__name__]


@pytest.mark.promise("Errors", "The runbook lists every error.")
def test_the_runbook_has_every_error() -> None:
    runbook = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [c.__name__ for c in defined_classes() if f"`{c.__name__}`" not in runbook] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:s3cr3t@host/x: gone", "https://***@host/x: gone"),
        ("'https://s3cr3t@host' is wrong", "'https://***@host' is wrong"),
        ("http://user:s3@cr3t@host:9/x", "http://***@host:9/x"),
        ("http://user:s3/cr3t@host/x", "http://***@host/x"),
        ("s3://b/p?token=s3cr3t&key=s3cr3t x", "s3://b/p?token=***&key=*** x"),
        ("of http://a:s3@b/ and ftp://c:s3@d/", "of http://***@b/ and ftp://***@d/"),
        ("s3://bucket/models@v2", "s3://bucket/models@v2"),
        ("http://h:9/a@b/c", "http://h:9/a@b/c"),
        ("me@home: x?y=z", "me@home: x?y=z"),
    ],
)
def test_errors_show_no_secret_of_a_url(text: str, shown: str) -> None:
    assert redacted(text) == shown
    for kind in (ConfigError, StoreRefused, PeerLost, TransportTimeout):
        error = kind(text)
        assert str(error) == shown
        assert "s3" not in repr(error).replace("s3://", "")
        assert str(copy(error)) == shown


def test_a_secret_that_is_no_text_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASYNC_SECRET", "s3cr3t\udcff")
    assert network_secret() == b"s3cr3t\xff"


MADE_OTHERWISE = {
    "VersionGap": errors.VersionGap(held=1, base=2, offered=3),
    "Refused": errors.Refused(kind="LayoutMismatch", message="differs"),
    "SyncAborted": errors.SyncAborted("of one", may_follow=True),
    "EngineFailed": errors.EngineFailed("of it", status=503),
    "InvalidTable": errors.InvalidTable("bad", row=7),
}


@pytest.mark.parametrize("kind", defined_classes(), ids=lambda kind: kind.__name__)
def test_an_error_arrives_in_another_process_as_it_is(kind: type[Exception]) -> None:
    """Ray, multiprocessing and executors send what a worker raises, by pickle."""
    error = MADE_OTHERWISE.get(kind.__name__) or kind("what, where, and what to do")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert type(again) is kind
    assert (str(again), vars(again), again.args) == (str(error), vars(error), error.args)
