"""What code a warm delta runs through: files of the package, and calls from one to another.

`python -m benchmarks.calls [--list]` syncs two small parameters from a trainer with the hook
`sync_after_step` to an engine in another process: over shared memory on a CPU, and over gloo with
the kernels under Triton's interpreter, as GPUs have it. The syncs from the fourth on are
counted by `sys.setprofile` in the thread of either end; of these the one with the fewest calls is
shown, since a wait may take another way.

A call counts if its nearest caller within the package stands in another file. Within transports/,
where waits look again and again, a place in the code that calls counts once.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import torch
from torch import nn

import deltasync
from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.delta.choice import Kernels
from deltasync.testing.processes import Child
from deltasync.transports import collective, shared_memory
from deltasync.transports.address import Address

PACKAGE = f"{Path(deltasync.__file__).parent}/"
MOST = {
    ("shared memory", "sender"): (26, 149),
    ("shared memory", "receiver"): (23, 121),
    ("batched, gloo", "sender"): (28, 186),
    ("batched, gloo", "receiver"): (25, 180),
}
"""(files, calls) of each end that a warm delta may take: what it takes today, and five calls for
waits that go another way on a busy machine.
"""
_WAITS = "transports/"
_KERNELS: dict[str, Kernels] = {"shared memory": "torch", "batched, gloo": "triton"}
_SYNCS, _COUNTED_FROM, _TIMEOUT_S = 6, 4, 300.0


class Calls:
    """Calls into a file of the package from another one, in one thread.

    Attributes:
        edges: How often (file of the caller, file called, function called).
        files: All files in which a function was called.
    """

    def __init__(self) -> None:
        self.edges: Counter[tuple[str, str, str]] = Counter()
        self.files: set[str] = set()
        self._of_waits: set[tuple[str, int, str]] = set()

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
        caller = frame.f_back  # also through others' code, as context managers
        while caller is not None and (there := _file_of(caller)) is None:
            caller = caller.f_back
        if caller is None or there is None or there == here:
            return
        name = frame.f_code.co_qualname
        if there.startswith(_WAITS) and here.startswith(_WAITS):
            place = there, caller.f_lineno, name
            if place in self._of_waits:
                return
            self._of_waits.add(place)
        self.edges[there, here, name] += 1


def _file_of(frame: FrameType) -> str | None:
    """The file of the package that it runs in, if it does."""
    path = frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else None


def measured(path: str) -> dict[str, Calls]:
    """What the "sender" and the "receiver" call on a path in the least of the syncs counted."""
    module, found = _model(), dict[str, Calls]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    options = SenderOptions(kernels=_KERNELS[path])
    with TemporaryDirectory(prefix="deltasync-") as folder:
        link: collective.Sender | shared_memory.Sender = (
            shared_memory.Sender(Path(folder) / "link")
            if path == "shared memory"
            else collective.Sender()
        )
        address, answer = Address.of(link), Path(folder) / "answer"
        assert address is not None
        with (
            Child(_follow, path, address.model_dump_json(), answer) as engine,
            WeightSender(ModuleSource(module), link, options=options) as sender,
        ):
            sync_after_step(optimizer, sender, on_error="raise", timeout_s=_TIMEOUT_S)
            sender.wait_for_receivers(1, timeout_s=_TIMEOUT_S)
            found["sender"] = _least(lambda number: _step(optimizer, module, number))
            engine.wait(timeout_s=_TIMEOUT_S)
        weights, files, edges = json.loads(answer.read_text())
    if weights != _weights(module):
        raise AssertionError("the ends differ")
    found["receiver"] = Calls()
    found["receiver"].files.update(files)
    found["receiver"].edges.update({tuple(edge): count for edge, count in edges})
    return found


def _follow(path: str, address: str, answer: Path) -> None:
    """The engine's process."""
    module = _model()
    link = Address.model_validate_json(address).receiver(torch.device("cpu"))
    options = ReceiverOptions(kernels=_KERNELS[path])
    with WeightReceiver(ModuleTarget(module), link, options=options) as receiver:
        found = _least(lambda _: receiver.receive_weights(timeout_s=_TIMEOUT_S))
    answer.write_text(json.dumps([_weights(module), [*found.files], [*found.edges.items()]]))


def _least(sync: Callable[[int], object]) -> Calls:
    """Those of the sync with the fewest, of all that are counted."""
    found = []
    for number in range(1, _SYNCS + 1):
        calls = Calls()
        with calls.counted() if number >= _COUNTED_FROM else nullcontext():
            sync(number)
        if number >= _COUNTED_FROM:
            found.append(calls)
    return min(found, key=lambda calls: calls.edges.total())


def _step(optimizer: torch.optim.Optimizer, module: nn.Module, number: int) -> None:
    """A step that changes one element."""
    weight = module.get_parameter("0.weight")
    weight.grad = torch.zeros_like(weight)
    weight.grad[number, number] = 1.0
    optimizer.step()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()


def _weights(module: nn.Module) -> list[list[int]]:
    return [p.detach().view(torch.int16).view(-1).tolist() for p in module.parameters()]


def main() -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="each function, by caller and file")
    is_listed = parser.parse_args().list
    for path in dict.fromkeys(path for path, _ in MOST):
        for end, found in measured(path).items():
            files, count = MOST[path, end]
            print(
                f"{path}, {end}: {len(found.files)} files (at most {files}), "
                f"{found.edges.total()} calls between them (at most {count})"
            )
            for (caller, called, function), number in sorted(found.edges.items()):
                if is_listed:
                    print(f"  {number:3} {caller} -> {called}: {function}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
