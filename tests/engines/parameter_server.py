"""A ParameterServer that brings a whole checkpoint to an engine, as a program.

python -m tests.engines.parameter_server FILE

The engine knows where to find its socket.
"""

from __future__ import annotations

import os
import sys

from checkpoint_engine.ps import ParameterServer

from tests.engines.plugin.cpu_parameter_server import let_parameter_servers_send
from tests.worlds.ranks import free_port


def main(file: str) -> None:
    let_parameter_servers_send()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    parameters = ParameterServer(master_addr="127.0.0.1", master_port=free_port())
    parameters.register_checkpoint("whole", files=[file])
    parameters.gather_metas("whole")
    parameters.update("whole", lambda _: None)


if __name__ == "__main__":
    main(sys.argv[1])
