"""The in-process transport keeps the contract; it is the reference."""

from __future__ import annotations

from pathlib import Path

from deltasync.testing.links import Ends
from deltasync.testing.transport import TransportContract
from deltasync.transports import inprocess


class TestInProcess(TransportContract):
    def ends(self, tmp_path: Path) -> Ends:
        sender = inprocess.Sender()
        return Ends(lambda: sender, sender.receiver, crosses_processes=False)
