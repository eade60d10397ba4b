"""A ParameterServer that brings a whole checkpoint to an engine, as a program.

python -m tests.engines.parameter_server FILE [URL of a server of SGLang's]
"""

from __future__ import annotations

import os
import sys

from checkpoint_engine.ps import ParameterServer

from deltasync.integrations.http import Http
from tests.engines.plugin.cpu_parameter_server import let_parameter_servers_send
from tests.worlds.ranks import free_port


def main(file: str, url: str | None = None) -> None:
    def ask(sockets: list[tuple[str, str]]) -> None:
        if url is not None:  # otherwise the engine knows where to find the socket
            Http(url).post("update_weights_from_ipc", {"zmq_handles": dict(sockets)})

    let_parameter_servers_send()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    parameters = ParameterServer(master_addr="127.0.0.1", master_port=free_port())
    parameters.register_checkpoint("whole", files=[file])
    parameters.gather_metas("whole")
    parameters.update("whole", ask)


if __name__ == "__main__":
    main(*sys.argv[1:])
