"""Engines whose compiled code has the weights as constants are told of it when they join."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from tests.worlds.toy_engines import joined

FROZEN = """
    import logging, warnings
    warnings.simplefilter("ignore")
    import torch
    from torch import nn
    import torch._inductor.config as inductor
    from tests.worlds.toy_engines import joined

    def network():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    logging.basicConfig(level=logging.WARNING)
    trainer, engine, x = network(), network().eval(), torch.randn(2, 64)
    compiled = torch.compile(engine)
    with torch.no_grad(), inductor.patch(freezing=True):
        compiled(x)
    assert not inductor.freezing
    with joined(trainer, engine), torch.no_grad():
        print("stale", not torch.allclose(compiled(x), trainer(x)))
"""


def told(program: str, **environment: str) -> tuple[str, int]:
    """What a process prints, and how often it warns of frozen weights."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.count("torch.compile freezes these weights")


@pytest.mark.promise(
    "What operators see",
    "An engine whose compiled code has frozen copies of its weights is warned of.",
)
def test_an_engine_whose_code_was_frozen_is_told_that_it_is_stale() -> None:
    assert told(FROZEN) == ("stale True\n", 1)


def test_an_engine_that_will_be_frozen_is_told() -> None:
    """The setting of an environment; those of a program hold in the thread that made them."""
    program = """
        import torch._inductor.config
        from torch import nn
        from tests.worlds.toy_engines import joined

        with joined(nn.Linear(8, 8), nn.Linear(8, 8)):
            pass
    """
    assert told(program, TORCHINDUCTOR_FREEZING="1") == ("", 1)


@pytest.mark.filterwarnings("ignore")  # of torch, about its own compiler
def test_weights_that_are_used_as_they_are_raise_no_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = nn.Linear(8, 8)
    compiled = torch.compile(engine, backend="eager")
    compiled(torch.zeros(8))
    with joined(nn.Linear(8, 8), engine):
        pass
    assert "freezes" not in caplog.text
