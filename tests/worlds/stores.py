"""Stores for tests: a folder, memory of this process, and S3 by a moto server in a process."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import boto3

from deltasync.store.objects import StoreOptions
from tests.worlds.faults import Faults, faulty

KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class Place:
    """Where a test keeps its objects."""

    url: str
    options: StoreOptions = field(default_factory=StoreOptions)
    folder: Path | None = None

    def having(self, **options: Any) -> Place:
        """The same place, reached with other options."""
        return replace(self, options=self.options.model_copy(update=options))


class Link(NamedTuple):
    """A bucket as it is, the same through a proxy, and what the proxy does."""

    near: Place
    far: Place
    faults: Faults


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a moto server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def s3_place(endpoint: str, **options: Any) -> Place:
    """An empty bucket."""
    name, config = f"bucket-{uuid.uuid4().hex[:12]}", {"endpoint": endpoint, **KEYS}
    made = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    made.create_bucket(Bucket=name)
    return Place(f"s3://{name}/models", StoreOptions(config=config, **options))


@contextlib.contextmanager
def linked(endpoint: str, **options: Any) -> Iterator[Link]:
    """An empty bucket, near and far."""
    with faulty(endpoint) as (proxy, faults):
        near = s3_place(endpoint, **options)
        yield Link(near, near.having(config=near.options.config | {"endpoint": proxy}), faults)


def memory_place() -> Place:
    return Place(f"memory://{uuid.uuid4().hex}")


def local_place(folder: Path) -> Place:
    return Place(str(folder), folder=folder)


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file gets larger in here."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, ignored)


def wait_until(done: object, *, timeout_s: float = 30.0) -> None:
    """Return when `done()` is true."""
    assert callable(done)
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
