"""deltasync: push only the changed weights of an RL trainer into live inference engines."""

from deltasync.delta.apply import apply_patch
from deltasync.delta.diff import diff
from deltasync.delta.patch import Chunk, ChunkedPatch, DensePatch, Patch, SparsePatch
from deltasync.delta.policy import Costs, Policy
from deltasync.delta.recorder import CheckpointTensor
from deltasync.delta.shard import ShardSpec
from deltasync.delta.sparsity import Sparsity, sparsity
from deltasync.errors import DeltaSyncError
from deltasync.sync.crew import Crew
from deltasync.sync.crew_rank import CrewRank
from deltasync.sync.hook import StepHook, sync_after_step
from deltasync.sync.options import ReceiverOptions, SenderOptions
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.reloaded import ReloadedTarget
from deltasync.sync.routed import RoutedTarget
from deltasync.sync.sender import WeightSender
from deltasync.sync.session import ReceiverState
from deltasync.sync.source import ModuleSource, NamedTensor, WeightSource
from deltasync.sync.staging_thread import StagingThread
from deltasync.sync.stats import SyncStats
from deltasync.sync.target import ModuleTarget, WeightTarget

__all__ = [
    "CheckpointTensor",
    "Chunk",
    "ChunkedPatch",
    "Costs",
    "Crew",
    "CrewRank",
    "DeltaSyncError",
    "DensePatch",
    "ModuleSource",
    "ModuleTarget",
    "NamedTensor",
    "Patch",
    "Policy",
    "ReceiverOptions",
    "ReceiverState",
    "ReloadedTarget",
    "RoutedTarget",
    "SenderOptions",
    "ShardSpec",
    "SparsePatch",
    "Sparsity",
    "StagingThread",
    "StepHook",
    "SyncStats",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "WeightTarget",
    "apply_patch",
    "diff",
    "sparsity",
    "sync_after_step",
]
