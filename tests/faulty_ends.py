"""Ends of users that break a rule of their contract: `tests/test_contracts.py` runs this file.

Each class names the tests of the contract that must fail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from deltasync import ModuleTarget
from deltasync.delta.bits import Flat
from deltasync.errors import LayoutMismatch
from deltasync.sync.target.base import WeightTarget
from deltasync.testing.links import Ends
from deltasync.testing.transport import TransportContract
from deltasync.transports import inprocess
from deltasync.transports.base import Frame
from deltasync.wire.messages import ParameterSpec
from tests.worlds.target_contract import TargetContract


class _Target(TargetContract):
    """Over a module, whose parameters have flat names."""

    names = ("a", "b", "c", "d")
    made: ClassVar[type[ModuleTarget]]

    def make_target(self, state: dict[str, Tensor]) -> WeightTarget:
        self.module = nn.Module()
        for name, tensor in state.items():
            self.module.register_parameter(name, nn.Parameter(tensor.clone()))
        return self.made(self.module)

    def replace_storage(self, name: str) -> None:
        parameter = self.module.get_parameter(name)
        parameter.data = parameter.data.clone()


class Blind(ModuleTarget):
    def check_unmoved(self) -> None:
        """Notice nothing."""


class Copying(ModuleTarget):
    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        live = super().bind(layout)
        return {number: Flat.of(one.tensor.detach().clone()) for number, one in live.items()}


class Stubborn(ModuleTarget):
    """Numbers parameters as in the first layout."""

    _first: dict[int, Flat] | None = None

    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        found = super().bind(layout)
        self._first = self._first or found
        return self._first


class Lenient(ModuleTarget):
    """Takes what it knows of a layout, and says nothing of the rest."""

    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        try:
            return super().bind(layout)
        except LayoutMismatch:
            return {}


class TestBlind(_Target):
    made, fails = Blind, ("test_moved_storage_is_noticed",)


class TestCopying(_Target):
    made, fails = Copying, ("test_staged_commit_and_undo_are_exact",)


class TestStubborn(_Target):
    made, fails = Stubborn, ("test_binding_again_follows_the_layout",)


class TestLenient(_Target):
    made = Lenient
    fails = (
        "test_names_that_only_one_end_knows",
        "test_another_shape_or_dtype_is_refused_by_name",
    )


class Lending(inprocess.Sender):
    """Lends receivers the payload of whoever sends."""

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        with self._lock:
            for peer in self._members:
                self._links[peer].frames.append(frame)
            self._changed.notify_all()


class Shouting(inprocess.Sender):
    """Tells all what is meant for some."""

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        super().tell(self._members | set(peers), header, timeout_s=timeout_s)


class Patient(inprocess.Sender):
    """Keeps peers that are late."""

    def drop(self, peer: int) -> None:
        """Do nothing."""


class _Link(TransportContract):
    sender: ClassVar[type[inprocess.Sender]]

    def ends(self, tmp_path: Path, max_payload_bytes: int) -> Ends:
        sender = self.sender(max_payload_bytes=max_payload_bytes)
        return Ends(lambda: sender, sender.receiver, crosses_processes=False)


class TestLending(_Link):
    sender = Lending
    fails = (
        "test_other_payloads_are_refused",
        "test_a_tensor_may_be_overwritten_once_sent",
        "test_the_next_buffer_leaves_what_receivers_read_alone",
    )


class TestShouting(_Link):
    sender, fails = Shouting, ("test_some_peers_are_told",)


class TestPatient(_Link):
    sender, fails = Patient, ("test_who_replies_late_is_dropped_and_others_go_on",)
