"""Ranks of a trainer, and engines, as actors of tests."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, SyncStats, WeightSender
from deltasync.integrations.ray import Rendezvous


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 300)


def bits_of(module: nn.Module) -> str:
    """Of all weights as engines hold them."""
    text = [p.detach().bfloat16().view(torch.uint8).numpy().tobytes() for p in module.parameters()]
    return hashlib.sha256(b"".join(text)).hexdigest()


class Rank:
    """Holds all float32 weights, as the other ranks do, and changes them as they do."""

    def __init__(self, meeting: Rendezvous, rank: int) -> None:
        self.model = model()
        self.sender = meeting.sender(ModuleSource(self.model), rank=rank)

    def pid(self) -> int:
        return os.getpid()

    def send(self, wait_for: int = 0, timeout_s: float = 60.0) -> SyncStats:
        if wait_for and isinstance(self.sender, WeightSender):
            self.sender.wait_for_receivers(wait_for, timeout_s=120)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter[::7] *= -1.5
        return self.sender.send_weights(timeout_s=timeout_s)

    def bits(self) -> str:
        return bits_of(self.model)


class Engine:
    """Holds bfloat16 weights."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.model = model().bfloat16()
        nn.init.zeros_(next(self.model.parameters()))
        self.weights = meeting.follow(ModuleTarget(self.model))

    def pid(self) -> int:
        return os.getpid()

    def held(self) -> tuple[int | None, str]:
        """The version and the bits, as a forward pass would see them."""
        with self.weights.serving():
            return self.weights.version, bits_of(self.model)
