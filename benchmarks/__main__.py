"""`python -m benchmarks`: cpu (the default), gpu, engines, sharded, codec, store ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import live
from benchmarks import report as reports
from benchmarks.record import RESULTS, ROOT, Environment, Result, append_records, read_records
from benchmarks.syncs.geometry import GEOMETRIES
from benchmarks.syncs.plan import Plan
from benchmarks.syncs.run import GROUPS, HOST_GROUPS, run_groups, run_ranks

IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
_MODEL = "qwen3-1.7b"
_GPU_NAMES = {"NCCL": "gpu-nccl", "CUDA IPC": "gpu-ipc"}

app = typer.Typer(add_completion=False, invoke_without_command=True)
Quick = Annotated[bool, typer.Option("--quick", help="Fewer densities and rounds.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Toy size: a smoke test.")]
Record = Annotated[bool, typer.Option("--record", help="Keep the records in benchmarks/results.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per case, nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Append the records to this file.")]
Only = Annotated[list[str] | None, typer.Option(help="One of them. Repeatable.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda if there is one.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Link = Annotated[
    str | None,
    typer.Option(help="local: one device (CUDA IPC); collective: two (NCCL), the default there."),
]


@app.callback()
def default(context: typer.Context) -> None:
    """Benchmarks of deltasync."""
    if context.invoked_subcommand is None:
        cpu()


@app.command(help=f"Measure on the CPU, one thread per process: {', '.join(HOST_GROUPS)}.")
def cpu(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    tiny: Tiny = False,
    only: Only = None,
) -> None:
    groups, scale = _chosen(only, HOST_GROUPS), _scale(quick=quick, tiny=tiny)
    geometry = {"full": "cpu", "quick": "cpu-small", "tiny": "tiny"}[scale]
    setup = Plan(scale=f"cpu-{scale}", geometry=geometry, device_type="cpu", link="local")
    kept = _kept("cpu", replace=groups == list(HOST_GROUPS)) if record else None
    _run_groups(setup, groups, kept, out, as_json=as_json)


@app.command(help=f"Measure on one or two GPUs, under seven minutes: {', '.join(GROUPS)}.")
def gpu(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    only: Only = None,
    geometry: Annotated[str, typer.Option(help=f"One of: {', '.join(GEOMETRIES)}.")] = _MODEL,
    device: Device = None,
    link: Link = None,
) -> None:
    groups = _chosen(only, GROUPS)
    setup = _setup("quick" if quick else "full", geometry, device, link)
    kept = None
    if record:
        if setup.transport not in _GPU_NAMES:
            raise typer.BadParameter("--record keeps what was measured on GPUs; see --out")
        is_whole = geometry == _MODEL and groups == list(GROUPS)
        kept = _kept(_GPU_NAMES[setup.transport], replace=is_whole)
    _run_groups(setup, groups, kept, out, as_json=as_json)


@app.command()
def engines(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    tiny: Tiny = False,
    device: Device = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Some of {', '.join(live.ENGINES)}. Repeatable."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="local, on the trainer's GPU; collective, on the next one."),
    ] = None,
) -> None:
    """Measure syncs of running engines."""
    chosen = _chosen(only, live.ENGINES)
    try:
        plan = live.LivePlan.choose(_scale(quick=quick, tiny=tiny), device, link, chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    kind = "gpu" if plan.device.type == "cuda" else "cpu"
    kept = _kept(f"live-{kind}", replace=True) if record else None
    _finish(live.run(plan), kept, out, as_json=as_json)


@app.command()
def sharded(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    tiny: Tiny = False,
    geometry: Annotated[str | None, typer.Option(help="The model that is synced.")] = None,
    device: Device = None,
    link: Annotated[
        str | None,
        typer.Option(help="local: trainers and engine ranks share GPUs; collective: none does."),
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help="The trainer's ranks: fsdp2 or tensor.")
    ] = None,
) -> None:
    """Measure trainers and engines with several ranks against gathering, on two GPUs or more."""
    try:
        scale = _scale(quick=quick, tiny=tiny)
        plan = Plan.sharded(scale, geometry, device, link, parallel)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if record and plan.device_type == "cpu":
        raise typer.BadParameter("--record keeps what was measured on GPUs; see --out")
    name = "sharded-nccl" if plan.link == "collective" else "sharded-ipc"
    failures: list[str] = []
    _finish(run_ranks(plan, failures), _kept(name) if record else None, out, as_json=as_json)
    _fail(failures)


@app.command()
def codec(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    tiny: Tiny = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A pair, such as masters-1e-6-k1. Repeatable.")
    ] = None,
) -> None:
    """Measure bytes and speed of codecs on real training steps; 15 minutes, one with --quick."""
    from benchmarks.codec.pairs import names
    from benchmarks.codec.runner import measure

    scale = _scale(quick=quick, tiny=tiny)
    results = measure(scale, _chosen(only, names(scale)))
    _finish(results, _kept("codec-cpu", replace=True) if record else None, out, as_json=as_json)


@app.command()
def store(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    tiny: Tiny = False,
) -> None:
    """Measure versions over links of 0.1, 1 and 10 Gbit/s to an S3 server; needs moto[server]."""
    from benchmarks.store.runner import measure

    results = measure(_scale(quick=quick, tiny=tiny))
    _finish(results, _kept("store-cpu", replace=True) if record else None, out, as_json=as_json)


@app.command()
def store_chaos(
    versions: Annotated[int, typer.Option(min=2, help="Number of versions.")] = 200,
    seed: Seed = 0,
    url: Annotated[
        str | None, typer.Option(help="An empty store; by default a temporary folder.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="As of deltasync; repeatable.")
    ] = None,
    out: Out = None,
) -> None:
    """Kill writer, readers and collector of a store at random; check every version and leftover."""
    from benchmarks.chaos.run import run_chaos

    pairs = dict(pair.split("=", 1) for pair in config or ())
    _conclude(run_chaos(versions=versions, seed=seed, url=url, config=pairs), out)


@app.command()
def fleet_chaos(
    versions: Annotated[int, typer.Option(min=2, help="Number of versions that are sent.")] = 500,
    seed: Seed = 0,
    engines: Annotated[int, typer.Option(min=3, help="Number of engine processes.")] = 8,
    min_engines: Annotated[int, typer.Option(min=1, help="As of EngineFleet.")] = 2,
    rolling: Annotated[bool, typer.Option("--rolling", help="One pause at a time.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="As of EngineFleet.")] = 2.0,
    link: Annotated[
        str, typer.Option(help="shared_memory, gloo, cuda_ipc or nccl.")
    ] = "shared_memory",
    out: Out = None,
) -> None:
    """Kill, stop, add and remove engines of a fleet at random; check all that they serve."""
    from benchmarks.fleets.chaos import LINKS, Plan, run_chaos
    from deltasync.integrations.fleet import Pauses

    if link not in LINKS:
        raise typer.BadParameter(f"{link} is none of {', '.join(LINKS)}")
    pauses: Pauses = "rolling" if rolling else "together"
    plan = Plan(versions, seed, engines, min_engines, pauses, timeout_s, link)
    _conclude(run_chaos(plan), out)


@app.command()
def table(
    records: Annotated[Path, typer.Option("--records", help="Where the records are.")],
) -> None:
    """Print all records of a file."""
    _show(read_records(records))


@app.command()
def plot(folder: Path = IMAGES) -> None:
    """Draw the pictures that pages show."""
    from benchmarks import plots

    for path in plots.draw_all(_results_by_name(), folder):
        print(path)


@app.command()
def report(page: Path = PAGE, readme: Path = README) -> None:
    """Put what records show into docs/performance.md, and the summary into README.md."""
    text, results = page.read_text(encoding="utf-8"), _results_by_name()
    for name, found in results.items():
        if f"<!-- begin {name} -->" in text:
            drawn = sorted((page.parent / "images").glob(f"{name}-*.svg"))
            images = [f"images/{path.name}" for path in drawn]
            text = reports.insert(text, name, reports.section(name, found), images)
    page.write_text(text, encoding="utf-8")
    summary = reports.summary(results["gpu-nccl"], results.get("live-gpu", ()))
    text = reports.insert(readme.read_text(encoding="utf-8"), "summary", summary)
    readme.write_text(text, encoding="utf-8")


def _results_by_name() -> dict[str, list[Result]]:
    """All records of measurements, by the name of their file."""
    kinds = ("cpu", "gpu", "sharded", "live", "codec", "store")
    paths = (path for kind in kinds for path in sorted(RESULTS.glob(f"{kind}*.jsonl")))
    return {path.stem: read_records(path) for path in paths}


def _chosen(only: list[str] | None, known: Iterable[str]) -> list[str]:
    """Those asked for, in their own order, or all. Raises BadParameter."""
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"{sorted(unknown)} are not among {list(known)}")
    return [one for one in known if not only or one in only]


def _scale(*, quick: bool, tiny: bool) -> str:
    return "tiny" if tiny else "quick" if quick else "full"


def _setup(scale: str, geometry: str, device: str | None, link: str | None) -> Plan:
    try:
        return Plan.choose(scale, geometry, device, link)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _kept(name: str, *, replace: bool = False) -> Path:
    """Where a run keeps its records, instead of those before if it is to `replace` them."""
    path = RESULTS / f"{name}.jsonl"
    if replace:
        path.unlink(missing_ok=True)
    return path


def _run_groups(
    setup: Plan, groups: list[str], kept: Path | None, out: Path | None, *, as_json: bool
) -> None:
    failures: list[str] = []
    _finish(run_groups(setup, groups, failures), kept, out, as_json=as_json)
    _fail(failures)


def _fail(failures: Iterable[str]) -> None:
    """Exits with 1 if there are any."""
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def _finish(
    results: Iterator[Result], kept: Path | None, out: Path | None, *, as_json: bool
) -> None:
    """Append the records to files as they come, and print them or show a table."""
    for path in filter(None, (kept, out)):
        results = append_records(path, results)
    done = []
    for result in results:
        done.append(result)
        if as_json:
            print(result.to_json(), flush=True)
        else:
            case = f"{result.case} {result.way} {result.model}"
            print(f"{case}, {100 * result.density:.3g} % changed", file=sys.stderr, flush=True)
    if not as_json:
        _show(done)


def _show(results: list[Result]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(reports.make_table(results))
    for text in dict.fromkeys(reports.describe(result.environment) for result in results):
        console.print(text, markup=False)
    missed = sum(not result.met for result in results)
    console.print(f"{missed} of {sum(r.goal is not None for r in results)} goals missed.")


def _conclude(found: Mapping[str, Any], out: Path | None) -> None:
    """Print what a run has found and where, as a line of JSON. Exits with 1 if it has failed."""
    line = json.dumps({**found, "environment": asdict(Environment.here())})
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            print(line, file=file)
    print(line)
    _fail(found["failures"])


if __name__ == "__main__":
    app()
