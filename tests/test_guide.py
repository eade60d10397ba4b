"""The loops of the guide, run by two processes as a user would, until the trainer ends."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from tests.worlds.programs import Program, completed

GUIDE = Path(__file__).parents[1] / "docs/guide.md"
_BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
TRAINER, RECEIVER, STAGING = _BLOCKS[:3]
STEPS = 3
MODEL = "import torch\nmodel = torch.nn.Linear(64, 64)\n"
SAYS = "print('weights', model.weight.sum().item())\n"


@pytest.fixture
def trainer() -> str:
    """That of the guide, with an engine and some steps."""
    steps = f"sender.wait_for_receivers(1)\n    for _ in range({STEPS}):\n        "
    steps += "model.weight.grad = torch.randn(64, 64)\n        optimizer.step()\n"
    assert TRAINER.count("optimizer.step()\n") == 1
    return TRAINER.replace("optimizer.step()\n", steps) + SAYS


def run_both(trainer: str, receiver: str) -> tuple[str, list[str]]:
    """The last line of the one, and the lines of the other, which both end by themselves."""
    name = f"{uuid.uuid4().hex}.sock"
    programs = [Program(text.replace("guide.sock", name)) for text in (trainer, receiver)]
    here, there = map(completed, programs)
    assert (here.returncode, there.returncode) == (0, 0), (here.stderr, there.stderr)
    return here.stdout.splitlines()[-1], there.stdout.splitlines()


def test_the_receiver_s_loop_ends_when_the_trainer_does(trainer: str) -> None:
    generate = "def generate(model, version):\n    print(version)\n"
    weights, lines = run_both(trainer, MODEL + generate + RECEIVER + SAYS)
    assert lines == [*map(str, range(1, STEPS + 1)), weights]


def test_the_staging_loop_ends_when_the_engine_does(trainer: str) -> None:
    """Here by its own word, when the trainer has gone, and has left its weights."""
    engine = f"""
class engine:
    def step():
        time.sleep(0.01)
        if receiver.version == {STEPS} and receiver.state.name == "OUTSIDE":
            stop.set()
    def pause(): print("paused")
    def resume(): pass
"""
    head = RECEIVER.partition("    while True")[0]
    loop = "".join(f"    {line}\n" for line in STAGING.splitlines())
    weights, lines = run_both(trainer, "import time\n" + MODEL + engine + head + loop + SAYS)
    assert lines == [*["paused"] * STEPS, weights]
