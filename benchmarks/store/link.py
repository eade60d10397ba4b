"""`python -m benchmarks.store.link PORT`: a slow link to a local port, until stdin ends.

It prints the port to connect to. A line on stdin with bits per second sets the rate of each
direction, null for no limit, and is answered by the bytes that went up and down since the last.

Each direction is a token bucket that all connections share: the trainer's upload and the engine's
download do not take from each other. The link adds no latency.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import threading
import time

_PIECE = 1 << 16
_BURST_S = 0.001  # shorter waits are left to the next piece


class Meter:
    """Bytes of one direction: how many may go in a second, and how many went."""

    def __init__(self) -> None:
        self._lock, self._free_at = threading.Lock(), 0.0
        self.bytes_per_s, self.num_bytes = math.inf, 0

    def take(self, num_bytes: int) -> None:
        """Return when they may go."""
        with self._lock:
            self.num_bytes += num_bytes
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s
            wait_s = self._free_at - now
        if wait_s > _BURST_S:
            time.sleep(wait_s)

    def reset(self, bytes_per_s: float) -> int:
        """A new rate. Returns the bytes that went since the last one."""
        with self._lock:
            went, self.num_bytes = self.num_bytes, 0
            self.bytes_per_s, self._free_at = bytes_per_s, 0.0
        return went


def main(port: str) -> None:
    up, down = Meter(), Meter()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    accepting = threading.Thread(target=_accept, args=(listener, int(port), up, down), daemon=True)
    accepting.start()
    print(listener.getsockname()[1], flush=True)
    for line in sys.stdin:
        bits_per_s = json.loads(line)
        bytes_per_s = math.inf if bits_per_s is None else bits_per_s / 8
        print(json.dumps([up.reset(bytes_per_s), down.reset(bytes_per_s)]), flush=True)


def _accept(listener: socket.socket, port: int, up: Meter, down: Meter) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for source, sink, meter in ((near, far, up), (far, near, down)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pump, args=(source, sink, meter), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, meter: Meter) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE):
            meter.take(len(data))
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main(*sys.argv[1:])
