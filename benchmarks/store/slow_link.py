"""`python -m benchmarks.store.slow_link`: follow large objects over a slow link, with restarts.

A trainer publishes two versions, each of which is one anchor, and is killed once in each. A reader
follows them through a link with a token bucket, to an S3 server over the trainer's folder. It is
killed while it fetches, twice in each version, and goes on in the same spool. Prints what came.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import Popen
from typing import Annotated
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import torch
import typer
from torch import Tensor, nn

from benchmarks.store.runner import _KEYS as KEYS
from benchmarks.store.runner import _line as line_of
from benchmarks.store.runner import _started as started
from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreReceiver, StoreSender
from deltasync.store.objects import StoreOptions

_COLUMNS, _BLOCK_ROWS = 4096, 1024
_VERSIONS, _KILLS_AT = (1, 2), (0.3, 0.7)
_MODULE = "benchmarks.store.slow_link"
app = typer.Typer()


def model_of(num_bytes: int) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    weight = torch.empty(num_bytes // 2 // _COLUMNS, _COLUMNS, dtype=torch.bfloat16)
    model.weight = nn.Parameter(weight, requires_grad=False)
    return model


def blocks(weight: Tensor, version: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(a part of the weight's bits, what it is in a version)."""
    bits = weight.view(torch.int16)
    for start in range(0, len(bits), _BLOCK_ROWS):
        here, random = bits[start : start + _BLOCK_ROWS], torch.Generator()
        random.manual_seed(version * 1_000_000 + start)
        made = torch.randint(-(1 << 15), 1 << 15, here.shape, generator=random, dtype=torch.int16)
        yield here, made


@app.command()
def publish(folder: Path, num_bytes: int, version: int) -> None:
    """Publish a version, as a trainer that was started again does."""
    model = model_of(num_bytes)
    for here, made in blocks(model.weight, version):
        here.copy_(made)
    print("publishes", flush=True)
    sender = StoreSender(ModuleSource(model), folder, options=SenderOptions(stream_id="run"))
    print(sender.publish().version, flush=True)


@app.command()
def follow(port: int, spool: Path, num_bytes: int, version: int) -> None:
    """Follow the run until a version is there. Prints shares, and at last whether it is right."""
    engine, config = model_of(num_bytes), {"endpoint": f"http://127.0.0.1:{port}", **KEYS}
    receiver = StoreReceiver(
        ModuleTarget(engine), "s3://bucket/run", store=StoreOptions(config=config), spool=spool
    )
    progress = receiver.progress
    progress.advanced = lambda _: print(progress.fetched_bytes / progress.total_bytes, flush=True)
    with receiver, receiver.follow() as follower:
        while receiver.version != version:
            if follower.wait_staged(timeout_s=10):
                print("staged", flush=True)
                follower.commit()
    is_equal = all(torch.equal(here, made) for here, made in blocks(engine.weight, version))
    print("equal" if is_equal else "WRONG", flush=True)


@app.command()
def serve(folder: Path) -> None:
    """Serve a folder as a bucket to readers, until stdin ends. Prints the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(folder))
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


def _handler_of(folder: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Silence."""

        def _path(self) -> Path:
            return folder / unquote(urlsplit(self.path).path).removeprefix("/bucket/")

        def _reply(self, status: int, headers: dict[str, str], data: bytes = b"") -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            with suppress(OSError):  # who asked may have been killed
                self.wfile.write(data)

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            if "list-type" in query:
                found = _listing(folder, query["prefix"][0], query)
                self._reply(200, {"Content-Type": "text/xml"}, found)
                return
            path = self._path()
            if not path.is_file():
                self._reply(404, {})
                return
            size, facts = path.stat().st_size, {"ETag": '"1"'}
            facts["Last-Modified"] = formatdate(usegmt=True)
            if self.command == "HEAD":
                self._reply(200, {**facts, "Content-Length": str(size)})
                return
            start, stop = 0, size
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(int(last) + 1, size)
                facts["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            with path.open("rb") as file:
                file.seek(start)
                self._reply(206 if asked else 200, facts, file.read(stop - start))

        do_HEAD = do_GET  # noqa: N815

        def do_PUT(self) -> None:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(200, {"ETag": '"1"'})

        def do_DELETE(self) -> None:
            self._path().unlink(missing_ok=True)
            self._reply(204, {})

    return Handler


def _listing(folder: Path, prefix: str, query: dict[str, list[str]]) -> bytes:
    """What S3 answers to a list of all below a prefix; folders only, with a delimiter."""
    after, names = query.get("start-after", [""])[0], list[str]()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name.startswith(prefix) and name > after:
            names.append(name)
    if "delimiter" in query:
        inner = {name.removeprefix(prefix).partition("/")[0] for name in names if "/" in name}
        found = "".join(
            f"<CommonPrefixes><Prefix>{prefix}{n}/</Prefix></CommonPrefixes>" for n in inner
        )
    else:
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{(folder / name).stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>1</ETag></Contents>"
            for name in names
        )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()


@app.command()
def run(
    num_bytes: Annotated[int, typer.Option(help="Of a version.")] = 2_000_000_000,
    mbit_s: Annotated[float, typer.Option(help="Of the link.")] = 320.0,
    folder: Annotated[Path | None, typer.Option(help="Where everything lies.")] = None,
) -> None:
    """Run both ends, kill and restart them, and print how much came."""
    began = time.monotonic()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        store, spool = place / "store" / "run", place / "spool"
        spool.mkdir()
        store.parent.mkdir()
        server = started(stack, _MODULE, "serve", str(store.parent))
        link = started(stack, "benchmarks.store.link", line_of(server))
        port = line_of(link)
        assert link.stdin is not None
        print(mbit_s * 1e6, file=link.stdin, flush=True)
        line_of(link)
        outcomes, kills = [], 0
        for version in _VERSIONS:
            _published(stack, store.parent, num_bytes, version)
            for share in (*_KILLS_AT, 2.0):
                words = (port, str(spool), str(num_bytes), str(version))
                reader = started(stack, _MODULE, "follow", *words)
                outcome = _until(reader, share)
                kills += outcome is not None and _share(outcome) < 1
                reader.kill()
                reader.wait(timeout=60)
            outcomes.append(outcome)
        print("none", file=link.stdin, flush=True)
        down = int(line_of(link).split()[1])
        needed = num_bytes * len(_VERSIONS)
        left = sum(path.stat().st_size for path in spool.rglob("*") if path.is_file())
    print(
        f"{len(_VERSIONS)} versions of {num_bytes / 1e9:.2f} GB over {mbit_s:g} Mbit/s, {kills} "
        f"readers and {len(_VERSIONS)} trainers killed: {outcomes}, {down / 1e9:.3f} GB came, "
        f"{down / needed:.3f}x, {left} bytes left, {time.monotonic() - began:.0f} s"
    )
    if outcomes != ["equal"] * len(_VERSIONS) or down > 1.1 * needed:
        raise typer.Exit(1)


def _published(stack: ExitStack, folder: Path, num_bytes: int, version: int) -> None:
    """A version, by a trainer that was killed while it uploaded, and started again."""
    for is_last in (False, True):
        trainer = started(stack, _MODULE, "publish", str(folder), str(num_bytes), str(version))
        assert line_of(trainer) == "publishes"
        while not is_last and not _has_begun(folder, version):
            time.sleep(0.01)
        if is_last:
            assert line_of(trainer) == str(version)
        trainer.kill()
        trainer.wait(timeout=60)


def _has_begun(folder: Path, version: int) -> bool:
    return any(path.is_file() for path in folder.rglob(f"{version:016}-anchor-*/*"))


def _until(reader: Popen[str], share: float) -> str | None:
    """The line at which a reader has such a share, or its last one."""
    assert reader.stdout is not None
    last = None
    for text in reader.stdout:
        last = text.strip()
        if _share(last) >= share:
            break
    return last


def _share(text: str) -> float:
    return float(text) if text[0].isdigit() else 1.0


if __name__ == "__main__":
    app()
