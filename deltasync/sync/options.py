"""Options of senders and receivers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pydantic import Field

from deltasync.delta.choice import Kernels
from deltasync.delta.coding import Coding
from deltasync.delta.options import OptionsModel
from deltasync.delta.snapshot import MIN_BUCKET_BYTES
from deltasync.transports.control.connection import LONGEST_S
from deltasync.wire.frame import MAX_PAYLOAD_BYTES
from deltasync.wire.messages import StreamId


class SenderOptions(OptionsModel):
    """How a sender sends. Sizes in bytes."""

    bucket_bytes: int | None = Field(
        default=None,
        ge=MIN_BUCKET_BYTES,
        le=MAX_PAYLOAD_BYTES,
        description="largest payload, if one tile takes no more; None for 64 MiB, on GPUs 256 MiB: "
        "there each one costs about a millisecond of waiting for each other",
    )
    max_inflight_bytes: int | None = Field(
        default=None,
        ge=0,
        description="changes kept until the decision; None for 5 % of the model, at least 1 MiB. "
        "Others overwrite the snapshot as they are sent",
    )
    compression: Coding = Field(
        default="none",
        description="of payloads: none, zstd, or a codec of changes, which needs fewer bytes and "
        "more time: gap; for stores also class, by old weights. Of weights on GPUs codecs are zstd",
    )
    wire_dtypes: dict[str, str] = Field(
        default_factory=dict,
        description="dtype name by parameter name pattern, where receivers disagree",
    )
    leave_out: Sequence[str] = Field(
        default=(),
        description="name patterns (as in fnmatch) of tensors that are not sent, since engines "
        "have no use for them; on all ranks of a group. Of a tied tensor the other names stay",
    )
    snapshot_device: str | None = Field(
        default=None, description="where the snapshot lives; None for each parameter's own device"
    )
    kernels: Kernels = Field(
        default="auto",
        description="what compares: Triton on GPUs, torch elsewhere, or one of them always",
    )
    stream_id: StreamId | None = Field(
        default=None, description="names the training run; None for a new one"
    )


def leaves_out(options: SenderOptions, name: str) -> bool:
    """Whether a tensor of this name is not sent."""
    return any(fnmatchcase(name, pattern) for pattern in options.leave_out)


class ReceiverOptions(OptionsModel):
    """How a receiver receives. Sizes in bytes."""

    max_staged_bytes: int | None = Field(
        default=None,
        ge=0,
        description="staged payload and undo log; None for a quarter of the weights, at least "
        "64 MiB. A sync that needs more is written in place: see `WeightReceiver.stage`",
    )
    stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=LONGEST_S,
        description="longest silence of the sender within a sync, seconds; at least twice the "
        "timeout of its own, since it may wait for another receiver",
    )
    scrub_every: int = Field(
        default=64,
        ge=0,
        description="re-compute 1/scrub_every of the weights at each sync; 0 for never",
    )
    kernels: Kernels = Field(
        default="auto",
        description="what writes: Triton on GPUs, torch elsewhere, or one of them always",
    )
