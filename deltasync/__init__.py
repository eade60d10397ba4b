"""deltasync: push only the changed weights of an RL trainer into live inference engines."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each public name, written once: what follows reads this block
    from deltasync.delta.shard import ShardSpec as ShardSpec
    from deltasync.engines.reloaded import ReloadedTarget as ReloadedTarget
    from deltasync.engines.routed import RoutedTarget as RoutedTarget
    from deltasync.engines.routes.recorder import CheckpointTensor as CheckpointTensor
    from deltasync.errors import DeltaSyncError as DeltaSyncError
    from deltasync.files.export import export_weights as export_weights
    from deltasync.files.patch import Patch as Patch
    from deltasync.files.patch import apply_patch as apply_patch
    from deltasync.files.patch import diff as diff
    from deltasync.files.sparsity import sparsity as sparsity
    from deltasync.store.anchors import PublishOptions as PublishOptions
    from deltasync.store.objects import StoreOptions as StoreOptions
    from deltasync.store.receiver import StoreReceiver as StoreReceiver
    from deltasync.store.sender import StoreSender as StoreSender
    from deltasync.sync.events import subscribe as subscribe
    from deltasync.sync.group.group import TrainerGroup as TrainerGroup
    from deltasync.sync.group.rank import TrainerRank as TrainerRank
    from deltasync.sync.module import ModuleSource as ModuleSource
    from deltasync.sync.module import ModuleTarget as ModuleTarget
    from deltasync.sync.options import ReceiverOptions as ReceiverOptions
    from deltasync.sync.options import SenderOptions as SenderOptions
    from deltasync.sync.receiver import WeightReceiver as WeightReceiver
    from deltasync.sync.sender import WeightSender as WeightSender
    from deltasync.sync.source.tensors import NamedTensor as NamedTensor
    from deltasync.sync.source.tensors import WeightSource as WeightSource
    from deltasync.sync.staging_thread import StagingThread as StagingThread
    from deltasync.sync.stats import SyncStats as SyncStats
    from deltasync.sync.target.base import WeightTarget as WeightTarget
    from deltasync.trainers.hook import sync_after_step as sync_after_step

__version__ = "0.2.0"

_HOMES = {
    alias.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deltasync.")
    for alias in node.names
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # which is to see that a name does not exist

    def __getattr__(name: str) -> object:
        """Import what is public where it is first used: torch takes seconds, and --help none."""
        if name in _HOMES:
            globals()[name] = found = getattr(import_module(_HOMES[name]), name)
            return found
        if find_spec(f"deltasync.{name}") is None:
            raise AttributeError(f"module 'deltasync' has no attribute {name!r}")
        return import_module(f"deltasync.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
