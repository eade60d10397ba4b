"""A store below the home folder, as a shell would name it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from deltasync import ModuleSource, ModuleTarget, StoreReceiver, StoreSender


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    StoreSender(ModuleSource(nn.Linear(2, 2)), "~/store").publish()
    StoreSender(ModuleSource(nn.Linear(2, 2)), Path("~/other")).publish()
    assert not list(here.iterdir())
    assert {path.name for path in home.iterdir()} == {"store", "other"}
    with StoreReceiver(ModuleTarget(nn.Linear(2, 2)), "~/store") as receiver:
        assert receiver.fetch() == 1
