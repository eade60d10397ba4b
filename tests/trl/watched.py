"""The recipe for TRL as it is, which also notes what both ends hold: watched.py FOLDER NOTES."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROBE = {"prompts": [[5, 6, 7], [8, 9, 10]], "count": 24, "seed": 0}


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe, models = example("trl_grpo"), example("transformers_cpu")
generated: Callable[..., dict[str, Any]] = recipe.generated
Rollouts: Any = recipe.Rollouts


class Watched(Rollouts):
    """Compares the second process with a model that loads the trainer's weights."""

    model: Any = None

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        super().on_train_begin(*given, **named)
        self.model = named["model"]
        self.probe()

    def on_step_end(self, *given: Any, **named: Any) -> None:
        super().on_step_end(*given, **named)
        self.probe()

    def probe(self) -> None:
        print(json.dumps(PROBE), file=self.process.stdin, flush=True)
        self.note(PROBE, json.loads(self.process.stdout.readline()), "probe")

    def generate(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        answer: dict[str, Any] = super().generate(prompts, trainer)
        asked = {"prompts": answer["prompt_ids"], "count": 16, "seed": trainer.state.global_step}
        self.note(asked, answer, "rollouts")
        del answer["sha256"]
        return answer

    def note(self, asked: dict[str, Any], answer: dict[str, Any], kind: str) -> None:
        folder = sys.argv[1]
        fresh = recipe.AutoModelForCausalLM.from_pretrained(folder, dtype=recipe.torch.bfloat16)
        fresh.load_state_dict(self.model.state_dict())
        expected = generated(fresh, **asked)
        noted = {
            "kind": kind,
            "trainer": models.sha256(self.model),
            "engine": answer["sha256"],
            "is_as_expected": all(answer[key] == rows for key, rows in expected.items()),
            "answer": [answer["completion_ids"], answer["logprobs"]],
        }
        with Path(os.environ["NOTES"]).open("a", encoding="utf-8") as notes:
            print(json.dumps(noted), file=notes)


def watched(model: Any, **request: Any) -> dict[str, Any]:
    """What the second process answers."""
    return generated(model, **request) | {"sha256": models.sha256(model)}


if __name__ == "__main__":
    recipe.__file__, recipe.generated = __file__, watched  # the second process is this, too
    recipe.train(sys.argv[1], Watched) if len(sys.argv) == 2 else recipe.serve(*sys.argv[1:])
