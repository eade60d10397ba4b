"""`python -m tests.sync.thin send|receive HOST PORT SYNCS`: the ends of a link between hosts.

The sender chooses codecs by the speed that it sees, and prints a line of JSON for each sync.
"""

from __future__ import annotations

import json
import sys

import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    WeightReceiver,
    WeightSender,
)
from deltasync.transports import collective
from tests.sync.test_coded import model, nudged

NUMEL = 2_000_000
SECRET = b"of the test"


def send(host: str, port: int, syncs: int) -> None:
    source, options = model(1, NUMEL), SenderOptions(compression="auto")
    link = collective.Sender(host, port, secret=SECRET)
    with WeightSender(ModuleSource(source), link, options=options) as sender:
        _say(listens=True)
        sender.wait_for_receivers(1, timeout_s=60)
        for seed in range(syncs):
            stats = sender.send_weights(timeout_s=60)
            _say(
                kind=stats.kind,
                coding=stats.compression,
                gbit_s=stats.link_gbit_s,
                nnz=stats.nnz,
                numel=stats.numel,
            )
            generator = torch.Generator().manual_seed(seed)
            nudged(source.get_parameter("a").data, 0.02, generator)


def receive(host: str, port: int, syncs: int) -> None:
    link = collective.Receiver(host, port, secret=SECRET)
    with WeightReceiver(ModuleTarget(model(2, NUMEL)), link) as receiver:
        for _ in range(syncs):
            receiver.receive_weights(timeout_s=60)


def _say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    role, host, port, syncs = sys.argv[1:]
    {"send": send, "receive": receive}[role](host, int(port), int(syncs))
