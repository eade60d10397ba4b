"""Outputs in a folder where others may write too: they cannot lead a write elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deltasync.errors import ConfigError
from deltasync.files.output import appearing

Swap = Callable[[Path, Path], None]


def to_a_link(there: Path, precious: Path) -> None:
    there.symlink_to(precious)


def to_a_folder_of_links(there: Path, precious: Path) -> None:
    there.mkdir()
    (there / "out").symlink_to(precious / "out")


@pytest.mark.parametrize("swap", [to_a_link, to_a_folder_of_links])
@pytest.mark.parametrize("fails", [False, True])
def test_who_swaps_the_temporary_folder_harms_no_other_files(
    swap: Swap, fails: bool, tmp_path: Path
) -> None:
    shared, precious = tmp_path / "shared", tmp_path / "precious"
    shared.mkdir()
    (precious / "deep").mkdir(parents=True)
    for name in ("out", "deep/c"):
        (precious / name).write_text("precious")
        (precious / name).chmod(0o600)
    out = shared / "out"
    out.write_text("old")
    out.chmod(0o666)
    try:
        with appearing(out, replaces=True) as made:
            (folder,) = (one for one in shared.iterdir() if one != out)
            folder.rename(shared / "moved")
            swap(folder, precious)
            made.write_text("new")
            if fails:
                raise ConfigError("planted")
    except ConfigError:
        assert fails
    for name in ("out", "deep/c"):
        assert (precious / name).read_text() == "precious"
        assert (precious / name).stat().st_mode & 0o777 == 0o600
    assert out.read_text() == ("old" if fails else "new")
