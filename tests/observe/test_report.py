"""The page of a run: whole, valid, and safe whatever names and messages it shows."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.observe.report.page import make_page
from deltasync.observe.report.scales import Bins, LogScale, round_rows
from deltasync.observe.report.series import series_of
from deltasync.observe.report.texts import escaped, seconds, shortened, size
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


def page_of(path: Path, events: Sequence[SyncEvent], title: str = "run.jsonl") -> str:
    with RunLog(path) as log:
        for event in events:
            log(event)
    return make_page(read_run(path), title)


def history(versions: int, layers: int = 4) -> list[SyncEvent]:
    """Deltas after a full sync; every seventh fails first."""
    found: list[SyncEvent] = [sync(version=1, kind="full", base_version=None, nnz=1000, joined=2)]
    for version in range(2, versions + 1):
        if version % 7 == 0:
            found.append(failed(version=version))
        by = {f"layers.{n}": (version * n % 11) / 100 for n in range(layers)}
        found.append(sync(version=version, nnz=version % 13, density_by=by))
    return found


@pytest.mark.parametrize("versions", [1, 2, 10, 60, 10_000])
def test_a_page_is_whole_and_loads_nothing(versions: int, tmp_path: Path) -> None:
    text = page_of(tmp_path / "run.jsonl", history(versions))
    page = Page(text)
    assert len(text) < 1_000_000
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "base", "form", "a", "img"}
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "http" not in re.sub(r"Content-Security-Policy|http-equiv", "", text)
    assert f"{versions:,}" in page.texts
    svgs = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert sum(one["class"] == "wide" for one in svgs) == len(svgs) / 2 > 0


def test_what_the_script_shows_fits_what_is_drawn(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path / "run.jsonl", history(300)))
    data = page.texts[next(n for n, t in enumerate(page.texts) if t.startswith("{"))]
    shown = json.loads(data)
    for tag, attributes in page.elements:
        if tag == "svg":
            assert attributes["data-key"] in shown
            bins = shown[attributes["data-key"]]
            width = int(str(attributes["viewbox"]).split()[2])
            step = float(str(attributes["data-step"]))
            assert len(bins) * step < width
            assert all(len(each) == 1 + 4 for each in bins) or not int(str(attributes["data-rows"]))
    assert shown["names"] == [f"layers.{n}" for n in range(4)]


def test_names_and_messages_are_text_and_nothing_else(tmp_path: Path) -> None:
    events = [
        sync(density_by={EVIL: 0.5, "ok": 0.1}, warnings=(EVIL,), lost={EVIL: EVIL}),
        failed(ValueError(EVIL), role="receiver", name=EVIL, corrupted=EVIL, lost={EVIL: EVIL}),
        sync(version=3, density_by={EVIL: 0.5}),
    ]
    page = Page(page_of(tmp_path / "run.jsonl", events, title=EVIL))
    assert page.count("script") == 2  # the data and the script
    assert page.count("img") == 0
    assert not any("\u202e" in text or "\x00" in text for text in page.texts)
    assert any("\\u202e" in text for text in page.texts)


@given(text=st.text())
def test_escaped_text_is_no_markup(text: str) -> None:
    found = escaped(text)
    assert not set(found) & set("<>\"'")
    assert all(character.isprintable() for character in found)


def test_what_happened_is_counted_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    events = [
        *[failed()] * 5,
        sync(version=1, joined=2, full_synced=1, lost={"b[0/1]": "PeerLost: gone"}),
        failed(ValueError("x"), role="receiver", name="a[0/1]", is_dirty=True, corrupted="w"),
        received(was_dirty=True),
        sync(version=2, warnings=("look here",)),
    ]
    text = page_of(path, events)
    series = series_of(read_run(path))
    assert [row.version for row in series.rows] == [1, 2]
    assert (series.num_failures, dict(series.by_error)) == (6, {"SyncAborted": 5, "ValueError": 1})
    assert series.count("failed") == 2  # a streak is one
    assert [each.text for each in series.happenings if each.mark == "recovered"] == [
        "covers 5 failed syncs",
        "a dirty receiver is whole",
        "covers 1 failed sync",
    ]
    for part in ("corrupted weights in w: ValueError: x; the receiver is dirty", "look here"):
        assert part in text
    assert "1 of 2 receivers needed a full sync" in text


def failing(name: str) -> SyncEvent:
    return failed(ValueError("x"), role="receiver", name=name)


def test_only_a_success_of_the_same_end_recovers_its_failures(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    page_of(path, [failing("a[0/1]"), sync(), received(name="b[0/1]"), published(), sync()])
    assert series_of(read_run(path)).count("recovered") == 0
    page_of(path, [received(name="a[0/1]"), failed(), received(), sync()])
    found = [each for each in series_of(read_run(path)).happenings if each.mark == "recovered"]
    assert [(each.who, each.place) for each in found] == [("a[0/1]", 2), ("", 2)]


def test_streaks_of_several_ends_are_listed_once_each(tmp_path: Path) -> None:
    """Also by logs that have the last failure of a streak long after it."""
    path, lines = tmp_path / "run.jsonl", []
    page_of(path, [failing("a[0/1]"), failing("b[0/1]")])
    start, *two = path.read_text().splitlines()
    for count in (1, 2, 5):
        lines += [line.replace('"repeated":1', f'"repeated":{count}') for line in two]
    page_of(tmp_path / "rows", [sync(ended_at=1.7e9 + 1), sync(ended_at=1.7e9 + 2)])
    rows = (tmp_path / "rows").read_text().splitlines()[1:]
    path.write_text("\n".join([start, *lines[:4], *rows, *lines[4:]]))
    series = series_of(read_run(path))
    assert series.num_failures == 10
    assert [(each.who, each.text, each.place) for each in series.happenings] == [
        ("a[0/1]", "ValueError: x (5 times in a row)", 0),
        ("b[0/1]", "ValueError: x (5 times in a row)", 0),
    ]


def test_logs_of_stores_and_of_receivers_are_drawn_too(tmp_path: Path) -> None:
    text = page_of(tmp_path / "a", [published(version=n) for n in range(1, 5)])
    assert "Versions published to a store" in text
    assert "Bytes written" in text
    text = page_of(tmp_path / "b", [received(version=n) for n in range(1, 5)])
    assert "Syncs of receivers" in text
    assert "How long the engine had to pause" in text
    extreme = sync(version=(1 << 63) - 1, ended_at=-1e300, commit_s=1e15, total_s=1e-320, nnz=1)
    Page(page_of(tmp_path / "d", [extreme, sync(numel=0, nnz=0, payload_bytes=0, dense_bytes=0)]))
    text = page_of(tmp_path / "c", [failed()])
    assert "No sync of this log has succeeded." in text


def test_skipped_lines_are_said(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    page_of(path, history(3))
    with path.open("ab") as file:
        file.write(b'{"event": "sync", "ver')
    assert "1 line was skipped, the first is line 5: torn" in make_page(read_run(path), "x")


def test_a_restarted_trainer_goes_on_to_the_right(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    page_of(path, history(5))
    page_of(path, history(3))
    assert [row.version for row in series_of(read_run(path)).rows] == [1, 2, 3, 4, 5, 1, 2, 3]
    Page(make_page(read_run(path), "x"))


def test_the_heat_map_is_a_picture_of_the_densities(tmp_path: Path) -> None:
    events = [sync(version=n, density_by={"a": 0.001, "b": 0.1 * (n % 2)}) for n in range(1, 5)]
    page = Page(page_of(tmp_path / "run.jsonl", events))
    picture = next(str(a["href"]) for tag, a in page.elements if tag == "image")
    png = base64.b64decode(picture.partition(",")[2])
    data = png[png.index(b"IDAT") + 4 :]
    rows = zlib.decompressobj().decompress(data)
    assert len(rows) == 2 * 5
    low, high = set(rows[1:5]), list(rows[6:])
    assert len(low) == 1
    assert [level == 0 for level in high] == [False, True, False, True]
    assert high[0] > low.pop() > 0


@given(rows=st.integers(1, 5000), most=st.integers(1, 500))
def test_bins_have_every_row_once(rows: int, most: int) -> None:
    bins = Bins.of(rows, most)
    ends = [bins.ends(number) for number in range(bins.number)]
    assert [end for _, end in ends[:-1]] == [first for first, _ in ends[1:]]
    assert (ends[0][0], ends[-1][1]) == (0, rows)
    assert all(first < end for first, end in ends)
    for number, (first, end) in enumerate(ends):
        assert bins.of_row(first) == bins.of_row(end - 1) == number


@given(values=st.lists(st.floats(0, 1e12), min_size=1))
def test_scales_keep_order_and_have_ticks(values: list[float]) -> None:
    scale = LogScale.of(values)
    if scale is None:
        assert max(values) <= 1e-15
        return
    shares = [scale.share(value) for value in sorted(values)]
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)
    assert len(scale.ticks(6)) <= 6


@pytest.mark.parametrize("value", [5e-324, 1e-16, 1e-15, 1.0, 1e15])
def test_scales_of_one_value_have_it_in_them(value: float) -> None:
    scale = LogScale.of([value, value])
    if scale is not None:
        assert 0 < scale.share(value) < 1
        assert scale.ticks(6)


@given(start=st.integers(0, 10**6), number=st.integers(1, 3000), most=st.integers(2, 12))
def test_few_rows_are_named(start: int, number: int, most: int) -> None:
    rows = round_rows(range(start, start + number), most)
    assert 1 <= len(rows) <= 2 * most
    assert all(0 <= row < number for row in rows)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1000), "1 kB"),
        (size(999_999), "1 MB"),
        (size(5e15), "5000 TB"),
        (size(3.44e9), "3.44 GB"),
        (seconds(5e-6), "5 us"),
        (seconds(0.00126), "1.26 ms"),
        (seconds(90), "90 s"),
        (seconds(9000), "2.5 h"),
        (shortened("model.embed_tokens", 13), "model..tokens"),
    ],
)
def test_numbers_are_short(text: str, shown: str) -> None:
    assert text == shown


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_finds_no_fault(tmp_path: Path) -> None:
    """Nothing on the console, and nothing wider than a phone."""
    events = [*history(40), sync(version=41, density_by={EVIL * 20: 0.5}, lost={EVIL: EVIL * 9})]
    page = page_of(tmp_path / "run.jsonl", events)
    probe = (
        "<script>addEventListener('load', () => { const f = document.querySelector('iframe'); "
        "const d = f.contentDocument.documentElement; "
        "f.contentDocument.querySelectorAll('svg').forEach((svg) => svg.dispatchEvent("
        "new PointerEvent('pointermove', {clientX: 200, clientY: 300, bubbles: true}))); "
        "document.title = d.scrollWidth - d.clientWidth + ' too wide'; });</script>"
    )
    (tmp_path / "run.html").write_text(page, encoding="utf-8")
    for width in (390, 1200):
        frame = f'<iframe src="run.html" width={width} height=900></iframe>'
        (tmp_path / "probe.html").write_text(f"<!doctype html><title>0</title>{frame}{probe}")
        done = subprocess.run(
            [
                *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
                *("--enable-logging=stderr", "--allow-file-access-from-files"),
                f"--user-data-dir={tmp_path / 'profile'}",
                (tmp_path / "probe.html").as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "CONSOLE" not in done.stderr, done.stderr
        assert "<title>0 too wide</title>" in done.stdout
