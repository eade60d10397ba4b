"""What a run of the demo reports: plain data, written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

from deltasync import SyncStats


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
        version: The version that the rollout process holds.
        kind: "full" or "delta".
        reward: Mean reward of the rollouts that this version generated.
        nnz: Elements that changed, of `numel`.
        density: nnz / numel.
        payload_bytes: Bytes sent; a dense sync would send `dense_bytes`.
        diff_s: Finding what changed. `transfer_s`: until the receiver has staged it.
        commit_s: The pause of the receiver.
        verified: The SHA-256 of the bytes that the rollout process holds equals the trainer's.
        rollout_s: Generating the rollouts.
    """

    version: int
    kind: str
    reward: float
    nnz: int
    numel: int
    density: float
    payload_bytes: int
    dense_bytes: int
    diff_s: float
    transfer_s: float
    commit_s: float
    verified: bool
    rollout_s: float

    @classmethod
    def of(cls, stats: SyncStats, *, verified: bool, reward: float, rollout_s: float) -> Self:
        """The record of one sync and of the rollouts after it."""
        return cls(
            version=stats.version,
            kind=stats.kind,
            reward=reward,
            nnz=stats.nnz,
            numel=stats.numel,
            density=stats.density,
            payload_bytes=stats.payload_bytes,
            dense_bytes=stats.dense_bytes,
            diff_s=stats.diff_s,
            transfer_s=stats.transfer_s,
            commit_s=stats.commit_s,
            verified=verified,
            rollout_s=rollout_s,
        )


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
