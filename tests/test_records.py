"""Pages show the figures of the records that are kept, and no others."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from benchmarks.__main__ import IMAGES, PAGE, README, app


def test_pages_hold_what_the_records_give(tmp_path: Path) -> None:
    pages = {}
    for page in (PAGE, README):
        pages[page] = tmp_path / page.name
        pages[page].write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "images").mkdir()
    for image in IMAGES.glob("*.svg"):
        (tmp_path / "images" / image.name).touch()
    done = CliRunner().invoke(
        app, ["report", "--page", str(pages[PAGE]), "--readme", str(pages[README])]
    )
    assert done.exit_code == 0, done.output
    for page, copy in pages.items():
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
