"""TRL's own GRPOTrainer with the recipe of docs/examples/trl_grpo.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engines.programs import Program
from tests.trl import watched

STEPS = 4


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "TRL's rollouts are of the trainer's weights after every optimizer step, bit for bit. "
    "`make test-trl`",
)
@pytest.mark.timeout(300)
def test_rollouts_are_of_the_weights_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, notes = tmp_path / "model", tmp_path / "notes"
    watched.models.write_model(str(folder))
    monkeypatch.setenv("NOTES", str(notes))
    with Program("-m", "tests.trl.watched", folder) as program:
        said = program.wait()
    versions = re.findall(r"^v(\d+): ([\d.]+)% changed, (\d+) bytes$", said, re.MULTILINE)
    assert [int(version) for version, *_ in versions] == list(range(1, STEPS + 2))
    assert [float(share) > 0 for _, share, _ in versions] == [False] + STEPS * [True]
    noted: list[dict[str, Any]] = [json.loads(line) for line in notes.read_text().splitlines()]
    for note in noted:
        assert note["engine"] == note["trainer"]
        assert note["is_as_expected"]
    probes = [note for note in noted if note["kind"] == "probe"]
    rollouts = [note for note in noted if note["kind"] == "rollouts"]
    assert len({note["engine"] for note in probes}) == len(probes) == STEPS + 1
    assert [note["engine"] for note in rollouts] == [note["engine"] for note in probes[:STEPS]]
    assert len({json.dumps(note["answer"]) for note in probes}) == STEPS + 1
    assert len({json.dumps(note["answer"][0]) for note in probes}) > 1  # tokens, too
