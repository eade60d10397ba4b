"""`python -m benchmarks`: cpu (the default), gpu, engines, sharded, verl, codec, soak ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import headlines, live, live_report
from benchmarks import report as cpu_report
from benchmarks.cases import GROUPS
from benchmarks.codec import command as codec_command
from benchmarks.codec import record as codec_record
from benchmarks.codec import report as codec_report
from benchmarks.engines import EnginesPlan
from benchmarks.engines import run as run_engines
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.geometry import GEOMETRIES
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.worker import GROUPS as GPU_GROUPS
from benchmarks.gpu.worker import run_groups
from benchmarks.record import RESULTS, ROOT, Environment, Result, append_records, read_records
from benchmarks.runner import GroupFailed, run_group
from benchmarks.scale import command as scale_command
from benchmarks.sharded.plan import ShardedPlan
from benchmarks.sharded.runner import run_ranks
from benchmarks.soak import DEFAULT_GEOMETRY, Plan, run_soak
from benchmarks.store import command as store_command
from benchmarks.store import record as store_record
from benchmarks.store import report as store_report
from benchmarks.verl import VerlPlan
from benchmarks.verl import run as run_verl

RECORDS = RESULTS / "cpu.jsonl"
GPU_RECORDS = {"NCCL": RESULTS / "gpu-nccl.jsonl", "CUDA IPC": RESULTS / "gpu-ipc.jsonl"}
CODEC_GPU_RECORDS = RESULTS / "codec-gpu.jsonl"
LIVE_RECORDS = {"cpu": RESULTS / "live-cpu.jsonl", "cuda": RESULTS / "live-gpu.jsonl"}
ENGINE_RECORDS = {"cpu": RESULTS / "engines-cpu.jsonl", "cuda": RESULTS / "engines-gpu.jsonl"}
SHARDED_RECORDS = {
    "collective": RESULTS / "sharded-nccl.jsonl",
    "local": RESULTS / "sharded-ipc.jsonl",
}
VERL_RECORDS = RESULTS / "verl-cpu.jsonl"
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
_MODEL = "qwen3-1.7b"

app = typer.Typer(add_completion=False, invoke_without_command=True)
app.command()(codec_command.codec)
app.command()(store_command.store)
app.command()(scale_command.scale)
Records = Annotated[Path, typer.Option("--records", help="Where the records are.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer densities and rounds.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Toy size: a smoke test.")]
Record = Annotated[bool, typer.Option("--record", help="Keep the records in benchmarks/results.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per case, nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Append the records to this file.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda if there is one.")]
Link = Annotated[
    str | None,
    typer.Option(help="local: one device (CUDA IPC); collective: two (NCCL), the default there."),
]


@app.callback()
def default(context: typer.Context) -> None:
    """Benchmarks of deltasync."""
    if context.invoked_subcommand is None:
        cpu()


@app.command()
def cpu(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Some of: {', '.join(GROUPS)}. Repeatable.")
    ] = None,
) -> None:
    """Measure on the CPU, one thread per process; `fleet` apart, under eight minutes, or one."""
    groups = _chosen(only, GROUPS)
    results = _measure(groups, "quick" if quick else "full")
    if record and groups == list(GROUPS):
        RECORDS.unlink(missing_ok=True)
    results = _kept(results, RECORDS if record else None, out)
    with _told_on_failure():
        _show(results, cpu_report.make_table, as_json=as_json)


@app.command()
def gpu(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Some of: {', '.join(GPU_GROUPS)}. Repeatable.")
    ] = None,
    geometry: Annotated[str, typer.Option(help=f"One of: {', '.join(GEOMETRIES)}.")] = _MODEL,
    device: Device = None,
    link: Link = None,
) -> None:
    """Measure on one or two GPUs; under seven minutes, under two and a half with --quick."""
    groups = _chosen(only, GPU_GROUPS)
    setup = _setup("quick" if quick else "full", geometry, device, link)
    failures: list[str] = []
    results = run_groups(setup, groups, failures)
    kept = _gpu_records(setup, groups) if record else None
    results = _kept(results, kept, out)
    _show(results, gpu_report.make_table, as_json=as_json)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


@app.command()
def engines(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Annotated[
        bool, typer.Option("--record", help="Replace the records in benchmarks/results.")
    ] = False,
    tiny: Tiny = False,
    device: Device = None,
    patch_file: Annotated[
        Path | None,
        typer.Option(help="vLLM's checkpoint_weight_patch.py, if vLLM is not installed."),
    ] = None,
    is_live: Annotated[
        bool, typer.Option("--live", help="Measure syncs of running engines instead.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Of --live: some of {', '.join(live.ENGINES)}. Repeatable."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Of --live: local, on the trainer's GPU; collective, on the next one."),
    ] = None,
) -> None:
    """Measure updates of an engine's model against vLLM's own methods."""
    if is_live:
        if unknown := set(only or ()) - live.ENGINES.keys():
            raise typer.BadParameter(f"--only {min(unknown)}")
        try:
            scale = _scale(quick=quick, tiny=tiny)
            chosen = live.LivePlan.choose(scale, device, link, only or ())
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        kept = LIVE_RECORDS[chosen.device.type] if record else None
        if kept is not None:
            kept.unlink(missing_ok=True)
        _show(_kept(live.run(chosen), kept, out), live_report.make_table, as_json=as_json)
        return
    plan = EnginesPlan.choose(_scale(quick=quick, tiny=tiny), device, patch_file)
    results: Iterator[Result] = run_engines(plan)
    kept = ENGINE_RECORDS[plan.device.type] if record else None
    if kept is not None:
        kept.unlink(missing_ok=True)
    results = _kept(results, kept, out)
    _show(results, gpu_report.make_table, as_json=as_json)


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
        plan = ShardedPlan.choose(scale, geometry, device, link, parallel)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if record and plan.device_type == "cpu":
        raise typer.BadParameter("--record keeps what was measured on GPUs; see --out")
    kept = SHARDED_RECORDS[plan.link] if record else None
    results = _kept(run_ranks(plan), kept, out)
    with _told_on_failure():
        _show(results, gpu_report.make_table, as_json=as_json)


@app.command()
def verl(
    quick: Quick = False,
    as_json: Json = False,
    out: Out = None,
    record: Record = False,
    tiny: Tiny = False,
) -> None:
    """Measure the checkpoint engine for verl between two processes of one host, over gloo."""
    results = run_verl(VerlPlan.choose(_scale(quick=quick, tiny=tiny)))
    if record:
        VERL_RECORDS.unlink(missing_ok=True)
    results = _kept(results, VERL_RECORDS if record else None, out)
    _show(results, gpu_report.make_table, as_json=as_json)


@app.command()
def soak(
    syncs: Annotated[
        int, typer.Option(min=1, help="Number of syncs, including those that break off.")
    ] = 2000,
    kill_every: Annotated[
        int, typer.Option(min=2, help="Kill the engine in every n-th sync.")
    ] = 200,
    geometry: Annotated[
        str, typer.Option(help="The model that is synced; tiny for CPUs.")
    ] = DEFAULT_GEOMETRY,
    device: Device = None,
    link: Link = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Of the trainer, and of the engine, some of which die.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Append that line to this file.")] = None,
) -> None:
    """Sync for a long time, kill and restart the engine; check bits, memory, descriptors."""
    setup = _setup("full", geometry, device, link)
    if ranks > 1:
        from benchmarks.sharded import soak as sharded_soak

        plan = ShardedPlan.of(ranks, setup)
        found = sharded_soak.run_soak(sharded_soak.Plan(plan, syncs, kill_every, seed))
    else:
        found = run_soak(Plan(setup, syncs, kill_every, seed))
    line = _appended(found, out)
    if as_json:
        print(line)
    else:
        Console(highlight=False).print("\n".join(f"{key}: {found[key]}" for key in found))
    for failure in found["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    if found["failures"]:
        raise typer.Exit(1)


@app.command()
def strangers(
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the attack.")] = 600.0,
    link: Annotated[str, typer.Option(help="collective, or local: a unix socket.")] = "collective",
    secret: Annotated[bool, typer.Option(help="Whether both ends have a secret.")] = True,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Append the line of JSON to this file.")] = None,
) -> None:
    """Attack a live trainer; check call times, memory, descriptors and its engine."""
    from benchmarks.strangers import Attack, run

    if link not in ("collective", "local"):
        raise typer.BadParameter(f"{link} is neither collective nor local")
    found = run(Attack(seconds, link, secret and link == "collective", seed))
    _conclude(found, out)


@app.command()
def store_chaos(
    versions: Annotated[int, typer.Option(min=2, help="Number of versions.")] = 200,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    url: Annotated[
        str | None, typer.Option(help="An empty store; by default a temporary folder.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="As of deltasync; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append the line of JSON to this file.")] = None,
) -> None:
    """Kill writer, readers and collector of a store at random; check every version and leftover."""
    from benchmarks.chaos.run import run_chaos

    pairs = dict(pair.split("=", 1) for pair in config or ())
    found = run_chaos(versions=versions, seed=seed, url=url, config=pairs)
    _conclude(found, out)


@app.command()
def fleet_chaos(
    versions: Annotated[int, typer.Option(min=2, help="Number of versions that are sent.")] = 500,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    engines: Annotated[int, typer.Option(min=3, help="Number of engine processes.")] = 8,
    min_engines: Annotated[int, typer.Option(min=1, help="As of EngineFleet.")] = 2,
    rolling: Annotated[bool, typer.Option("--rolling", help="One pause at a time.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="As of EngineFleet.")] = 2.0,
    link: Annotated[
        str, typer.Option(help="shared_memory, gloo, cuda_ipc or nccl.")
    ] = "shared_memory",
    out: Annotated[Path | None, typer.Option(help="Append the line of JSON to this file.")] = None,
) -> None:
    """Kill, stop, add and remove engines of a fleet at random; check all that they serve."""
    from benchmarks.fleets.chaos import LINKS, run_chaos

    if link not in LINKS:
        raise typer.BadParameter(f"{link} is none of {', '.join(LINKS)}")
    found = run_chaos(
        versions=versions,
        seed=seed,
        num_engines=engines,
        min_engines=min_engines,
        pauses="rolling" if rolling else "together",
        timeout_s=timeout_s,
        link=link,
    )
    _conclude(found, out)


@app.command()
def table(records: Records = RECORDS) -> None:
    """Print the records as Markdown."""
    print(_markdown(records))


@app.command()
def plot(folder: Path = IMAGES) -> None:
    """Draw all records into a folder; docs/images keeps what pages show."""
    from benchmarks import live_plots
    from benchmarks import plots as cpu_plots
    from benchmarks.codec import plots as codec_plots
    from benchmarks.gpu import plots as gpu_plots

    paths = cpu_plots.draw_all(read_records(RECORDS), folder) if RECORDS.exists() else []
    for records in filter(Path.exists, (*GPU_RECORDS.values(), *SHARDED_RECORDS.values())):
        paths += gpu_plots.draw_all(read_records(records), folder, name=records.stem)
    for records in filter(Path.exists, LIVE_RECORDS.values()):
        paths += live_plots.draw_all(read_records(records), folder, name=records.stem)
    if codec_record.RECORDS.exists():
        paths += codec_plots.draw_all(codec_record.read_records(codec_record.RECORDS), folder)
    for path in paths:
        if folder == IMAGES and path.stem not in headlines.IMAGES:
            path.unlink()
        else:
            print(path)


@app.command()
def report(page: Path = PAGE, readme: Path = README) -> None:
    """Put what records show into docs/performance.md, and the summary into README.md."""
    text = page.read_text(encoding="utf-8")
    kept = (
        RECORDS,
        *(r for of in (GPU_RECORDS, SHARDED_RECORDS, ENGINE_RECORDS) for r in of.values()),
        *LIVE_RECORDS.values(),
        VERL_RECORDS,
        codec_record.RECORDS,
        CODEC_GPU_RECORDS,
        store_record.RECORDS,
    )
    for records in kept:
        if records.exists() and f"<!-- begin {records.stem} -->" in text:
            drawn = sorted((page.parent / "images").glob(f"{records.stem}-*.svg"))
            images = [f"images/{path.name}" for path in drawn if path.stem in headlines.IMAGES]
            markdown = _markdown(records, only_headlines=True)
            text = gpu_report.insert(text, records.stem, markdown, images)
    page.write_text(text, encoding="utf-8")
    running = LIVE_RECORDS["cuda"]
    summary = gpu_report.make_summary(
        read_records(GPU_RECORDS["NCCL"]), read_records(running) if running.exists() else ()
    )
    text = gpu_report.insert(readme.read_text(encoding="utf-8"), "summary", summary)
    readme.write_text(text, encoding="utf-8")


def _markdown(records: Path, *, only_headlines: bool = False) -> str:
    if records == codec_record.RECORDS:
        codecs = codec_record.read_records(records)
        return codec_report.make_markdown(headlines.of_codecs(codecs) if only_headlines else codecs)
    if records == store_record.RECORDS:
        stores = store_record.read_records(records)
        return store_report.make_markdown(headlines.of_stores(stores) if only_headlines else stores)
    results = read_records(records)
    if records in LIVE_RECORDS.values():
        return live_report.make_markdown(headlines.of_live(results) if only_headlines else results)
    is_gpu = any(result.model for result in results)
    make: Callable[[list[Result]], str] = (
        gpu_report.make_markdown if is_gpu else cpu_report.make_markdown
    )
    if only_headlines:
        return headlines.without_parts(make(headlines.of_results(results)))
    return make(results)


def _chosen(only: list[str] | None, known: Iterable[str]) -> list[str]:
    """The groups asked for, in their own order. Raises BadParameter."""
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"{sorted(unknown)} are not among {list(known)}")
    return [group for group in known if not only or group in only]


def _appended(found: Mapping[str, Any], out: Path | None) -> str:
    """What a run has found and where, as a line of JSON, which the file has now, too."""
    line = json.dumps({**found, "environment": asdict(Environment.here())})
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            print(line, file=file)
    return line


def _conclude(found: Mapping[str, Any], out: Path | None) -> None:
    """Keep and show what a run has found. Exits with 1 if it has failed."""
    print(_appended(found, out))
    if found["failures"]:
        raise typer.Exit(1)


def _scale(*, quick: bool, tiny: bool) -> str:
    return "tiny" if tiny else "quick" if quick else "full"


def _setup(scale: str, geometry: str, device: str | None, link: str | None) -> Setup:
    try:
        return Setup.choose(scale, geometry, device, link)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _gpu_records(setup: Setup, groups: list[str]) -> Path:
    """Where a run keeps its records: a whole run replaces those before, one of codecs its own."""
    if setup.transport not in GPU_RECORDS:
        raise typer.BadParameter("--record keeps what was measured on GPUs; see --out")
    is_codec = groups == ["codec"]
    path = CODEC_GPU_RECORDS if is_codec else GPU_RECORDS[setup.transport]
    if setup.geometry == _MODEL and (is_codec or groups == list(GPU_GROUPS)):
        path.unlink(missing_ok=True)
    return path


def _measure(groups: list[str], scale: str) -> Iterator[Result]:
    """Records as they come, with progress on stderr."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(groups))
        for group in groups:
            progress.update(task, description=group)
            for result in run_group(group, scale):
                changed = f"{100 * result.density:.3g} % changed"
                progress.update(task, description=f"{group}: {changed}")
                yield result
            progress.advance(task)


def _kept(results: Iterator[Result], *paths: Path | None) -> Iterator[Result]:
    """The same records, appended to each file on their way."""
    for path in filter(None, paths):
        results = append_records(path, results)
    return results


@contextmanager
def _told_on_failure() -> Iterator[None]:
    """The error itself is on stderr already."""
    try:
        yield
    except GroupFailed as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


def _show(
    results: Iterator[Result], make_table: Callable[[list[Result]], Table], *, as_json: bool
) -> None:
    if as_json:
        for result in results:
            print(result.to_json(), flush=True)
        return
    done = list(results)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(make_table(done))
    if done:
        console.print(cpu_report.describe(done[0].environment))
    missed = sum(not result.met for result in done)
    console.print(f"{missed} of {sum(r.goal is not None for r in done)} goals missed.")


if __name__ == "__main__":
    app()
