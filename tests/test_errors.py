"""The tree drawn in the docstring of deltasync.errors is the tree that is defined."""

from __future__ import annotations

import inspect
import pickle
import re
from copy import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync import errors
from deltasync.config import network_secret
from deltasync.errors import ConfigError, PeerLost, StoreRefused, TransportTimeout, redacted

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^(?P<indent> *)[*+-] (?P<name>\w+)(\((?P<builtin>\w+)\))?(?P<remedy> +\S.*)?$")


def drawn_bases(docstring: str) -> dict[str, list[str]]:
    """Name -> names of the bases, in the order drawn. Two spaces of indent are one level."""
    bases: dict[str, list[str]] = {}
    path: list[str] = []
    for entry in filter(None, map(ENTRY.match, docstring.splitlines())):
        depth = len(entry["indent"]) // 2
        path[depth:] = [entry["name"]]
        parent = path[depth - 1] if depth else "Exception"
        bases[entry["name"]] = [parent, *filter(None, [entry["builtin"]])]
    return bases


def defined_classes() -> list[type]:
    members = vars(errors).values()
    return [c for c in members if inspect.isclass(c) and c.__module__ == errors.__name__]


def test_the_drawn_tree_is_the_defined_tree() -> None:
    defined = {c.__name__: [base.__name__ for base in c.__bases__] for c in defined_classes()}
    drawn = drawn_bases(inspect.getdoc(errors) or "")
    assert drawn == defined
    assert list(drawn) == list(defined), "drawn in another order than defined"


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
    ],
)
def test_errors_show_no_secret_of_a_url(text: str, shown: str) -> None:
    assert redacted(text) == shown
    for kind in (ConfigError, StoreRefused, PeerLost, TransportTimeout):
        error = kind(text)
        assert str(error) == shown
        assert "s3" not in repr(error).replace("s3://", "")
        assert str(copy(error)) == shown


@pytest.mark.parametrize(
    "text",
    ["tcp://10.0.0.1:9000: refused", "s3://bucket/models@v2", "http://h:9/a@b/c", "me@home: x?y=z"],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert str(ConfigError(text)) == text


_WORD = st.text("abcXYZ019._-%:@!", min_size=1, max_size=12)


@given(_WORD, _WORD, st.sampled_from(["https", "s3", "http"]))
def test_no_password_is_ever_shown(user: str, password: str, scheme: str) -> None:
    password = f"<{password}>"
    text = f"{scheme}://{user}:{password}@host/path?sig={password}: failed"
    assert password not in str(ConfigError(text))
    assert "host/path" in str(ConfigError(text))


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
