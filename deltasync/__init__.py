"""deltasync: push only the changed weights of an RL trainer into live inference engines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltasync import config as config
    from deltasync import quant as quant
    from deltasync import transports as transports
    from deltasync.delta.bits import Flat, Live
    from deltasync.delta.diff import apply_patch, diff
    from deltasync.delta.fold import fold
    from deltasync.delta.patch import Chunk, ChunkedPatch, DensePatch, Patch, SparsePatch
    from deltasync.delta.policy import Policy
    from deltasync.delta.routes.loading import Loader
    from deltasync.delta.routes.recorder import CheckpointTensor
    from deltasync.delta.shard import ShardSpec
    from deltasync.delta.sparsity import Sparsity, sparsity
    from deltasync.errors import DeltaSyncError
    from deltasync.files.export import Exported, export_weights
    from deltasync.store.anchors import PublishOptions
    from deltasync.store.objects import StoreOptions
    from deltasync.store.receiver import StoreReceiver
    from deltasync.store.sender import PublishStats, StoreSender
    from deltasync.sync.events import ReceiveStats, Subscription, SyncEvent, SyncFailed, subscribe
    from deltasync.sync.group.group import TrainerGroup
    from deltasync.sync.group.rank import TrainerRank
    from deltasync.sync.hook import StepHook, SupportsSendWeights, sync_after_step
    from deltasync.sync.module import ModuleSource, ModuleTarget
    from deltasync.sync.options import ReceiverOptions, SenderOptions
    from deltasync.sync.protocol.receiver_session import ReceiverState
    from deltasync.sync.protocol.round import SyncPhase
    from deltasync.sync.receiver import WeightReceiver
    from deltasync.sync.sender import WeightSender
    from deltasync.sync.source.tensors import NamedTensor, WeightSource
    from deltasync.sync.staging_thread import StagingThread
    from deltasync.sync.stats import SyncStats
    from deltasync.sync.target.base import WeightTarget, match_parameters, refuse_overlap
    from deltasync.sync.target.reloaded import ReloadedTarget
    from deltasync.sync.target.routed import RoutedTarget
    from deltasync.wire.messages import ParameterSpec

__version__ = "0.2.0"

__all__ = [
    "CheckpointTensor",
    "Chunk",
    "ChunkedPatch",
    "DeltaSyncError",
    "DensePatch",
    "Exported",
    "Flat",
    "Live",
    "Loader",
    "ModuleSource",
    "ModuleTarget",
    "NamedTensor",
    "ParameterSpec",
    "Patch",
    "Policy",
    "PublishOptions",
    "PublishStats",
    "ReceiveStats",
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
    "StoreOptions",
    "StoreReceiver",
    "StoreSender",
    "Subscription",
    "SupportsSendWeights",
    "SyncEvent",
    "SyncFailed",
    "SyncPhase",
    "SyncStats",
    "TrainerGroup",
    "TrainerRank",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "WeightTarget",
    "apply_patch",
    "diff",
    "export_weights",
    "fold",
    "match_parameters",
    "refuse_overlap",
    "sparsity",
    "subscribe",
    "sync_after_step",
]

# Imported when they are asked for: torch takes seconds, and a command's --help needs none of it.
_HOMES = {
    name: f"deltasync.{module}"
    for module, names in {
        "delta.bits": "Flat Live",
        "delta.diff": "apply_patch diff",
        "delta.fold": "fold",
        "delta.patch": "Chunk ChunkedPatch DensePatch Patch SparsePatch",
        "delta.policy": "Policy",
        "delta.routes.loading": "Loader",
        "delta.routes.recorder": "CheckpointTensor",
        "delta.shard": "ShardSpec",
        "delta.sparsity": "Sparsity sparsity",
        "errors": "DeltaSyncError",
        "files.export": "Exported export_weights",
        "store.anchors": "PublishOptions",
        "store.objects": "StoreOptions",
        "store.receiver": "StoreReceiver",
        "store.sender": "PublishStats StoreSender",
        "sync.events": "ReceiveStats Subscription SyncEvent SyncFailed subscribe",
        "sync.group.group": "TrainerGroup",
        "sync.group.rank": "TrainerRank",
        "sync.hook": "StepHook SupportsSendWeights sync_after_step",
        "sync.module": "ModuleSource ModuleTarget",
        "sync.options": "ReceiverOptions SenderOptions",
        "sync.protocol.receiver_session": "ReceiverState",
        "sync.protocol.round": "SyncPhase",
        "sync.receiver": "WeightReceiver",
        "sync.sender": "WeightSender",
        "sync.source.tensors": "NamedTensor WeightSource",
        "sync.staging_thread": "StagingThread",
        "sync.stats": "SyncStats",
        "sync.target.base": "WeightTarget match_parameters refuse_overlap",
        "sync.target.reloaded": "ReloadedTarget",
        "sync.target.routed": "RoutedTarget",
        "wire.messages": "ParameterSpec",
    }.items()
    for name in names.split()
}
_MODULES = {
    "config",
    "delta",
    "dtypes",
    "errors",
    "files",
    "integrations",
    "observe",
    "quant",
    "store",
    "sync",
    "testing",
    "transports",
    "wire",
}

if not TYPE_CHECKING:  # which is to see that a name does not exist

    def __getattr__(name: str) -> object:
        """Import what is public where it is first used."""
        if name in _MODULES:
            return import_module(f"deltasync.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'deltasync' has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(_HOMES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
