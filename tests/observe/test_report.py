"""The page of a run: whole, valid, and safe whatever names and messages it shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deltasync.observe.report import make_page
from deltasync.observe.run_lines import read_run
from deltasync.observe.run_log import RunLog
from deltasync.sync.events import SyncEvent
from tests.observe.made import failed, published, received, sync

VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>\u202e\x00'


class Page(HTMLParser):
    """A page whose elements are all closed in order; what it has of each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def charts(self) -> set[str]:
        """Their titles."""
        return {str(attributes["alt"]) for tag, attributes in self.elements if tag == "img"}


def page_of(path: Path, events: Sequence[SyncEvent], title: str = "run.jsonl") -> str:
    with RunLog(path) as log:
        for event in events:
            log(event)
    return make_page(read_run(path), title)


def history(versions: int) -> list[SyncEvent]:
    """Deltas after a full sync; every seventh fails first."""
    found: list[SyncEvent] = [sync(version=1, kind="full", base_version=None, nnz=1000, joined=2)]
    for version in range(2, versions + 1):
        if version % 7 == 0:
            found.append(failed(version=version))
        found.append(sync(version=version, nnz=version % 13))
    return found


@pytest.mark.promise(
    "What operators see",
    "A report loads nothing, and shows names and messages as text.",
)
@pytest.mark.parametrize("versions", [1, 10_000])
def test_a_page_is_whole_and_loads_nothing(versions: int, tmp_path: Path) -> None:
    text = page_of(tmp_path / "run.jsonl", history(versions))
    page = Page(text)
    assert len(text) < 1_000_000
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "base", "form", "a", "script"}
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "http" not in re.sub(r"Content-Security-Policy|http-equiv", "", text)
    assert f"{versions:,}" in page.texts
    assert {"Bytes of each version", "Pauses"} <= page.charts()
    assert f"v1 to v{versions}" in page.texts
    assert (f"<td>v{versions - versions % 7}</td>" in text) == (versions >= 7), "the newest"


@pytest.mark.promise(
    "What operators see",
    "A report loads nothing, and shows names and messages as text.",
)
def test_names_and_messages_are_text_and_nothing_else(tmp_path: Path) -> None:
    events = [
        sync(warnings=(EVIL,), lost={EVIL: EVIL}),
        failed(ValueError(EVIL), role="receiver", name=EVIL, corrupted=EVIL, lost={EVIL: EVIL}),
    ]
    page = Page(page_of(tmp_path / "run.jsonl", events, title=EVIL))
    assert page.count("script") == 0
    sources = [str(attributes["src"]) for tag, attributes in page.elements if tag == "img"]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not any("\u202e" in text or "\x00" in text for text in page.texts)
    assert any("\\u202e" in text for text in page.texts)


def test_what_happened_is_counted_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    events = [
        *[failed()] * 2,
        sync(version=1, joined=2, full_synced=1, lost={"b[0/1]": "PeerLost: gone"}),
        failed(ValueError("x"), role="receiver", name="a[0/1]", is_dirty=True, corrupted="w"),
        received(was_dirty=True),
        sync(version=2, warnings=("look here",)),
    ]
    text = page_of(path, events)
    run = read_run(path)
    assert [row.version for row in run.rows] == [1, 2]
    assert run.failures == {"SyncAborted": 2, "ValueError": 1}
    marks = " ".join(each.mark for each in run.happenings)
    assert marks == "failed failed lost full sync joined failed recovered warning"
    for part in ("corrupted weights in w: ValueError: x; the receiver is dirty", "look here"):
        assert part in text
    assert "1 of 2 receivers needed a full sync" in text


def test_logs_of_stores_and_of_receivers_are_drawn_too(tmp_path: Path) -> None:
    text = page_of(tmp_path / "a", [published(version=n) for n in range(1, 5)])
    assert "Versions published to a store" in text
    assert "Bytes written" in text
    text = page_of(tmp_path / "b", [received(version=n) for n in range(1, 5)])
    assert "Syncs of receivers" in text
    extreme = sync(version=(1 << 63) - 1, ended_at=1e11, commit_s=1e15, total_s=1e-320, nnz=1)
    Page(page_of(tmp_path / "d", [extreme, sync(numel=0, nnz=0, payload_bytes=0, dense_bytes=0)]))
    path = tmp_path / "c"
    page_of(path, [failed()])
    text = make_page(read_run(path), "x")
    assert "No sync of this log has succeeded." in text
