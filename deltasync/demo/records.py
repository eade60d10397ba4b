"""What a run of the demo reports: plain data, written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

from deltasync import SyncStats
from deltasync.delta.digests import digest_text
from deltasync.store.sender import PublishStats

_JSON = (
    *("version", "kind", "reward", "nnz", "numel", "density", "payload_bytes", "dense_bytes"),
    *("diff_s", "transfer_s", "commit_s", "verified", "rollout_s"),
)


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """One supervised step before the first sync."""

    step: int
    of: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One version of the weights: how it was synced, and how good it is.

    Attributes:
        stats: Of the sync.
        reward: Mean reward of the rollouts that this version generated.
        verified: The SHA-256 of the bytes that the rollout process holds equals the trainer's.
        rollout_s: Time to generate the rollouts.
        published: What came into the store, if there is one.
    """

    stats: SyncStats
    reward: float
    verified: bool
    rollout_s: float
    published: PublishStats | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields that are written, of this object and of `stats`."""
        found = {name: getattr(self if hasattr(self, name) else self.stats, name) for name in _JSON}
        if (published := self.published) is not None:
            found["store"] = {
                "version": published.version,
                "digest": digest_text(published.digest),
                "bytes": published.delta_bytes + published.anchor_bytes,
            }
        return found


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of a version as they were sent, in bf16, by parameter name."""

    name: Literal["first", "last"]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """A mean reward, its standard error, and over how many prompts."""

    mean: float
    standard_error: float
    num_prompts: int

    @classmethod
    def of(cls, rewards: Tensor) -> Self:
        """The score of float32[B] rewards."""
        count = len(rewards)
        return cls(rewards.mean().item(), rewards.std().item() / count**0.5, count)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores on fixed prompts: sampled at temperature 1 with a fixed seed, and greedy."""

    sampled: Score
    greedy: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run.

    Attributes:
        before: Of the first version. `after`: of the last.
        trainer_sha256: Of the trainer's last weights as bf16, taken beside the library.
        rollout_sha256: Of the bytes that the rollout process holds at the end.
        warm_up_s: Starting up and supervised training. `training_s`: everything after.
    """

    before: Evaluation
    after: Evaluation
    trainer_sha256: str
    rollout_sha256: str
    warm_up_s: float
    training_s: float

    @property
    def bit_identical(self) -> bool:
        """Whether both processes end with the same bytes."""
        return self.trainer_sha256 == self.rollout_sha256
