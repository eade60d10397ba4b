"""What code one warm delta runs through: files of the package, and calls from one to another.

`python -m benchmarks.calls [--list] [--draw FILE.svg]` syncs two small parameters within a process,
on CPUs: a trainer and an engine, a thread each. The third delta is counted by `sys.setprofile`.
"""

from __future__ import annotations

import sys
import threading
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import deltasync
from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.transports import inprocess

PACKAGE = f"{Path(deltasync.__file__).parent}/"
MOST = {"sender": (19, 95), "receiver": (14, 66)}
"""(files, calls) of each end that a warm delta may take; torch's modes are one file of each."""
Edge = tuple[str, str, str]


class Calls:
    """Calls into a file of the package from another one, in one thread.

    Attributes:
        edges: How often (file of the caller, file called, function called).
        files: All files in which a function was called.
    """

    def __init__(self) -> None:
        self.edges: Counter[Edge] = Counter()
        self.files: set[str] = set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What this thread calls meanwhile."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (here := _file_of(frame)) is None:
            return
        self.files.add(here)
        there = _caller_of(frame)
        if there is not None and there != here:
            self.edges[there, here, frame.f_code.co_qualname] += 1


def _file_of(frame: FrameType) -> str | None:
    """The file of the package that it runs in, if it does."""
    path = frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else None


def _caller_of(frame: FrameType) -> str | None:
    """The file of the package that has called, also through others' code, as context managers."""
    caller = frame.f_back
    while caller is not None and (found := _file_of(caller)) is None:
        caller = caller.f_back
    return None if caller is None else found


def counted_delta() -> dict[str, Calls]:
    """What each end of a link calls for one delta of a tiny model, after two others."""
    found = {end: Calls() for end in MOST}
    source, replica = _model(), _model()
    link = inprocess.Sender()
    sender = WeightSender(ModuleSource(source), link)
    receiver = WeightReceiver(ModuleTarget(replica), link.receiver())
    engine = threading.Thread(target=lambda: _receive(receiver, found["receiver"]))
    engine.start()
    sender.wait_for_receivers(1)
    sender.send_weights()
    for number in range(3):
        source.get_parameter("0.weight").data[number, number] = number + 1
        with found["sender"].counted() if number == 2 else nullcontext():
            sender.send_weights()
    engine.join()
    receiver.close()
    sender.close()
    if any(not torch.equal(p, q) for p, q in zip(*map(_weights, (source, replica)), strict=True)):
        raise AssertionError("the ends differ")
    return found


def _receive(receiver: WeightReceiver, calls: Calls) -> None:
    for _ in range(3):
        receiver.receive_weights()
    with calls.counted():
        receiver.receive_weights()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return list(model.parameters())


def draw(found: dict[str, Calls], file: Path) -> None:
    """The files of each end by folder, and the calls between them: the more, the wider the line."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "deltasync"  # the same calls make the same file
    figure = Figure(figsize=(12, 11), layout="constrained")
    for axes, (end, calls) in zip(figure.subplots(len(found)), found.items(), strict=True):
        axes.set_title(f"{end}: {len(calls.files)} files, {calls.edges.total()} calls", loc="left")
        axes.axis("off")
        places = _places(calls.files)
        widths: Counter[tuple[str, str]] = Counter()
        for (caller, called, _), number in calls.edges.items():
            widths[caller, called] += number
        for (caller, called), number in widths.items():
            arrow = {
                "arrowstyle": "-|>",
                "connectionstyle": "arc3,rad=0.2",
                "lw": 0.5 + number / 8,
                "color": "#3d7ea6",
                "alpha": 0.6,
            }
            axes.annotate("", places[called], places[caller], arrowprops=arrow)
        for path, (x, y) in places.items():
            name = path.removesuffix(".py").rpartition("/")[2]
            box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": "#8a8a8a"}
            axes.text(x, y, name, ha="center", va="center", fontsize=8, bbox=box)
        for folder in dict.fromkeys(path.rpartition("/")[0] for path in sorted(calls.files)):
            column = [places[p][0] for p in calls.files if p.rpartition("/")[0] == folder]
            axes.text(
                sum(column) / len(column),
                1.04,
                f"{folder}/",
                ha="center",
                fontsize=8,
                weight="bold",
            )
        axes.set(xlim=(-0.08, 1.08), ylim=(-0.05, 1.1))
    figure.savefig(file, metadata={"Date": None})


def _places(files: Iterable[str]) -> dict[str, tuple[float, float]]:
    """(across, up) of each file, in [0, 1]: a column for each folder, the upper layers first."""
    columns: dict[str, list[str]] = {}
    layers = ["sync", "delta", "transports", "wire"]
    for path in sorted(files, key=lambda path: (layers.index(path.split("/")[0]), path)):
        columns.setdefault(path.rpartition("/")[0], []).append(path)
    last = max(1, len(columns) - 1)
    return {
        path: (number / last + (row % 2 - 0.5) * 0.2 / last, 1 - (row + 0.5) / len(column))
        for number, column in enumerate(columns.values())
        for row, path in enumerate(column)
    }


def main(write: Callable[[str], object] = sys.stdout.write) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="each function, by caller and file")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="a picture of it")
    chosen = parser.parse_args()
    found = counted_delta()
    if chosen.draw is not None:
        draw(found, chosen.draw)
    for end, calls in found.items():
        files, count = MOST[end]
        write(
            f"{end}: {len(calls.files)} files (at most {files}), "
            f"{calls.edges.total()} calls between them (at most {count})\n"
        )
        if chosen.list:
            for (caller, called, function), number in sorted(calls.edges.items()):
                write(f"  {number:3} {caller} -> {called}: {function}\n")


if __name__ == "__main__":
    main()
