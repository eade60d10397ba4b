"""A trainer of a running server that dies in its second sync.

python -m tests.engines.dying FOLDER URL {prepared,decided,called}
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.integrations.vllm_core import UPDATE
from deltasync.sync.protocol.round import Round
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights


class Dying(HttpClient):
    """Its process ends before the call of an update, or during it."""

    where = ""

    def collective_rpc(self, method: str, *args: object) -> Any:
        if method == UPDATE and self.where == "called":
            threading.Thread(target=super().collective_rpc, args=(method, *args)).start()
            time.sleep(0.003)
        if method == UPDATE and self.where:
            die()
        return super().collective_rpc(method, *args)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, url: str, where: str) -> None:
    client, source = Dying(url), Weights(load_file(folder / "model.safetensors"))
    link = shared_memory.Sender(folder / f"dying-{where}")
    with EngineSync(source, VllmServer(client), link, paused=client.paused) as sync:
        sync.send_weights()
        for tensor in source.weights.values():
            tensor.view(-1)[1::3] *= 1.5
        client.where = where
        if where == "prepared":
            Round._commit = die  # type: ignore[method-assign, assignment]
        sync.send_weights()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
