"""A trainer is killed; what an engine proved to hold is what it goes on with."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from deltasync.files.checkpoint import Checkpoint
from tests.sync.json_process import Process
from tests.sync.rescue import NUMEL, fingerprint, model


def test_a_trainer_is_restored_from_an_engine_and_goes_on(tmp_path: Path) -> None:
    address = f"shared_memory:{tmp_path}/socket"

    def start(stack: ExitStack, *words: str) -> Process:
        errors = tmp_path / f"{words[0]}.err"
        command = [sys.executable, "-m", "tests.sync.rescue", *words]
        return stack.enter_context(Process(*command, errors=errors))

    with ExitStack() as stack:
        trainer = start(stack, "train", address, "")
        trainer.hear()
        engine = start(stack, "serve", address, str(tmp_path))
        assert engine.hear() == {"serves": True}
        for seed in range(3):
            trainer.tell(seed)
            engine.tell("commit")
            held, sent = engine.hear(), trainer.hear()
            assert held["hash"] == sent["hash"]
        trainer.kill()
        engine.tell("export rescued")
        assert engine.hear() == held
        restored = model(5, NUMEL)
        saved = Checkpoint(tmp_path / "rescued")
        restored.load_state_dict({name: saved.tensor(name) for name in saved.specs})
        assert fingerprint(restored) == sent["hash"]

        trainer = start(stack, "train", address, str(tmp_path / "rescued"))
        assert trainer.hear()["hash"] == sent["hash"]
        trainer.tell("-")  # the engine joins by its digest alone: not a weight is sent
        assert trainer.hear()["full_synced"] == 0
        for seed in range(7, 9):
            trainer.tell(seed)
            engine.tell("commit")
            held, sent = engine.hear(), trainer.hear()
            assert held["hash"] == sent["hash"]
