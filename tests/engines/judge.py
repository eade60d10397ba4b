"""Whether a model that was kept in sync is what the engine makes of the same weights when cold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.integrations.trainer_info import WithoutRoutes
from tests.engines.checkpoints import Specs, Weights, changed, random_weights, save
from tests.engines.cold import Engine, cold, connecting
from tests.engines.reached import Seen, seen

Served = Callable[[dict[str, Tensor]], dict[str, Tensor]]

EQUAL, REFUSED, FAILED, WRONG = "equal", "refused", "failed", "WRONG"


@dataclass
class Verdict:
    """Of one architecture, with one answer to weights without routes.

    Attributes:
        outcome: "equal" after every sync, "refused" when the trainer connects, with nothing changed
            then, "failed" for a sync that said so, "WRONG" for one that did not.
        message: What was raised, or when it went wrong.
        wrong: Paths of tensors that are not what they should be, or not where they were, where
            captured graphs look.
    """

    outcome: str
    message: str = ""
    wrong: list[str] = field(default_factory=list)


class Versions:
    """What is sent, one after the other, and what the engine makes of each when it is started."""

    def __init__(self, folder: Path, specs: Specs, served: Served = dict, **settings: Any) -> None:
        """`served` makes of a trainer's weights what the engine's checkpoint has.

        Engines are started with `settings`.
        """
        self.folder, self._settings = folder, settings
        first, second = random_weights(specs, 0), random_weights(specs, 1)
        few, others = changed(second, 0.01, 2), random_weights(specs, 4)
        every = first, second, few, few, others, changed(others, 0.001, 3)
        self.weights = [served(one) for one in every]
        self.cold = [self._cold(self.weights[number]) for number in (0, 1, -1)]
        again = self._cold(self.weights[-1])
        self.noise = {p for p, one in again.items() if _is_other(self.cold[-1].get(p), one)}
        self.noise |= again.keys() ^ self.cold[-1].keys()

    def _cold(self, weights: dict[str, Tensor]) -> dict[str, Seen]:
        model, _ = cold(self.folder, weights, **self._settings)
        return held(model)

    def follows(self) -> set[str]:
        """Paths of what is other for other weights."""
        old, new = self.cold[0], self.cold[-1]
        return {path for path, one in new.items() if _is_other(old.get(path), one)} - self.noise

    def judge(self, mode: WithoutRoutes) -> Verdict:
        """Start on the first, and sync all others."""
        save(self.folder, self.weights[0])
        model, config = cold(self.folder, **self._settings)
        before = held(model)
        source = Weights({name: tensor.clone() for name, tensor in self.weights[1].items()})
        with connecting(source, Engine(model, config), self.folder, without_routes=mode) as sync:
            try:
                sync.connect()
            except ConfigError as error:
                return self._refused(model, before, error)
            except Exception as error:  # noqa: BLE001 the judge says it
                return Verdict(FAILED, f"at connect: {_said(error)}")
            for version, weights in enumerate(self.weights[1:], 1):
                source.take(weights)
                try:
                    sync.send_weights()
                except Exception as error:  # noqa: BLE001 likewise
                    return Verdict(FAILED, f"v{version}: {_said(error)}")
                number = {1: 1, len(self.weights) - 1: -1}.get(version)
                if number and (wrong := self._wrong(model, before, number)):
                    return Verdict(WRONG, f"after v{version}", wrong)
        return Verdict(EQUAL)

    def _refused(self, model: Any, before: dict[str, Seen], error: Exception) -> Verdict:
        """A refusal leaves everything as it was."""
        wrong = self._wrong(model, before, 0)
        return Verdict(WRONG if wrong else REFUSED, f"at connect: {_said(error)}", wrong)

    def _wrong(self, model: Any, before: dict[str, Seen], number: int) -> list[str]:
        now, follows, found = held(model), self.follows(), []
        for path in self.cold[number].keys() - self.noise:
            is_other = path not in now or not now[path].has_bits_of(self.cold[number][path])
            stays = path in follows and path in before
            if is_other or (stays and now[path].address != before[path].address):
                found.append(path)
        return found


def assert_as_started(model: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """It holds what a worker holds that has just started on these weights."""
    fresh, _ = cold(folder, weights)
    now, wanted = held(model), held(fresh)
    assert [path for path, one in wanted.items() if not now[path].has_bits_of(one)] == []


def held(model: Any) -> dict[str, Seen]:
    """What is seen, but for handles; instead of them, what they make of each unit vector."""
    found = {path: one for path, one in seen(model).items() if not path.endswith(".handler_tensor")}
    for name, module in model.named_modules():
        packed: Any = getattr(module, "cpu_linear", None)
        for cell in getattr(packed, "__closure__", None) or ():
            if hasattr(handler := cell.cell_contents, "handler_tensor"):
                matrix = packed(torch.eye(handler.k, dtype=module.weight.dtype), None, None)
                found[f".{name}.cpu_linear()"] = replace(Seen.of(matrix), address=0)
    return found


def _is_other(left: Seen | None, right: Seen) -> bool:
    return left is None or not left.has_bits_of(right)


def _said(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
