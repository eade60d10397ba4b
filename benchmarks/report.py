"""Records as a table for a terminal, and as the sections of docs/performance.md and README.md.

A section shows what a reader decides by; `python -m benchmarks table --records FILE` prints all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.table import Table

from benchmarks.record import MEMORY, PER_PARAMETER, SPEED_UP, Environment, Result
from benchmarks.syncs.plan import ranks_of

TITLES = {
    "sync_over_dense": "whole sync vs. dense broadcast",
    "sync_over_usual": "whole sync vs. per-parameter sparse",
    "moe_sync": "whole sync of 19,000 parameters vs. as many bytes in 310",
    "moe_sync_most": "whole sync of 70,000 parameters vs. as many bytes in 310",
    "receivers_2": "whole sync to two engines vs. to one",
    "receivers_3": "whole sync to three engines vs. to one",
    "receivers_4": "whole sync to four engines vs. to one",
    "receivers_7": "whole sync to seven engines vs. to one",
    "quant_sync": "whole sync to block FP8 vs. to bfloat16",
    "adamw": "whole sync after an AdamW step vs. dense broadcast",
    "large": "whole sync of a large model",
    "large_over_dense": "whole sync of a large model vs. dense broadcast",
    "diff": "diff to indices, values and digests vs. a copy of the model",
    "diff_host_snapshot": "diff against a host snapshot vs. copying it to the GPU",
    "cpu_diff": "diff with values, speed relative to torch.ne + nonzero + gather",
    "cpu_sync": "whole sync, time relative to a sync of all elements",
    "parameter_sync": "whole sync of many small parameters",
    "memory_sender": "sender's memory beyond weights and snapshot vs. its bound",
    "memory_receiver": "receiver's memory beyond weights vs. its bound",
    "files": "diff of two checkpoint files vs. numpy reading and comparing them",
    "receivers_16": "whole sync of many engines, relative to one",
    "live_changed": "sync of a running engine, in one call vs. in several",
    "live_unchanged": "the same, without a change",
    "live_reload": "the same vs. vLLM's own reload",
    "sharded_over_dense": "whole sync vs. gather and dense broadcast",
    "sharded_over_gathered": "whole sync vs. gathering sparse changes to rank 0",
    "sharded_pause": "the engines' pause vs. its goal",
    "sharded_large": "whole sync of a tensor-parallel trainer vs. its goal",
    "sharded_large_pause": "the engines' pause in it vs. its goal",
    "sharded_adamw_over_dense": "whole sync after an AdamW step vs. gather and dense broadcast",
    "sharded_adamw_over_gathered": "the same vs. gathering sparse changes to rank 0",
    "sharded_adamw_pause": "the engines' pause after an AdamW step vs. its goal",
    "codec": "encoding of changes",
    "store": "a version through a store vs. the whole checkpoint",
}
WAYS = {  # the cases of the dense and of the sparse baseline: their names
    ("sync_over_dense", "sync_over_usual"): ("dense broadcast", "per-parameter sparse"),
    ("sharded_over_dense", "sharded_over_gathered"): (
        "gather, dense broadcast",
        "sparse, gathered to rank 0",
    ),
}
_LEFT_OUT = (  # of sections: what says the same once more
    "receivers_2", "receivers_3", "receivers_4", "sharded_adamw", "sharded_large_pause",
)  # fmt: skip
_ON_ONE_GPU = ("sync_over_dense", "sync_over_usual", "adamw")
_SWEPT = ("sync_", "diff", "sharded_")
_DENSITIES = (0.001, 0.003, 0.01, 0.05, 0.2, 1.0)
_TYPICAL_DENSITY = 0.003
_SEEN_BY = "vllm serve"
_COLUMNS = ("case", "model", "changed", "time", "baseline", "ratio", "goal")
CODEC_SPEEDS = {"gap, ulp, zstd": (60e6, "M changes/s"), "class": (0.25e9, "MB/s")}
"""The least speed of a codec in both ways, on the pairs that have a goal."""


def make_table(results: Iterable[Result]) -> Table:
    """For a terminal."""
    table = Table(*_COLUMNS)
    last = ""
    for result in sorted(results, key=_order):
        if last and result.case != last:
            table.add_section()
        last = result.case
        table.add_row(*cells(result), style=None if result.met else "red")
    return table


def section(name: str, results: Sequence[Result]) -> str:
    """What docs/performance.md shows of the records `name`, as Markdown."""
    make: dict[str, Callable[[Sequence[Result]], Iterator[str]]] = {
        "cpu": _cpu,
        "codec-cpu": _codec,
        "store-cpu": _store,
        "live-gpu": _live,
    }
    paragraphs = make.get(name, _gpu)(results)
    return "\n\n".join(filter(None, paragraphs))


def insert(page: str, name: str, text: str, images: Iterable[str] = ()) -> str:
    """`page` with images and `text` between the marks for `name`. Raises ValueError without."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"no place for {name}: {begin} ... {end}")
    shown = "".join(f"![{_alt(image)}]({image})\n\n" for image in images)
    return f"{head}{begin}\n\n{shown}{text}\n\n{end}{tail}"


def summary(results: Sequence[Result], live: Iterable[Result] = ()) -> str:
    """The few figures that the README shows, and where they were measured.

    Args:
        results: Of two GPUs.
        live: Of running engines; those are shown that are synced over the same link.
    """
    dense = {r.density: r for r in sorted(results, key=_order) if r.case == "sync_over_dense"}
    usual = {r.density: r for r in results if r.case == "sync_over_usual"}
    shown = [dense[density] for density in _DENSITIES]
    everything, sparse = WAYS["sync_over_dense", "sync_over_usual"]
    rows = {
        "deltasync, whole sync": [r.seconds for r in shown],
        "deltasync, engine paused": [r.parts["pause_s"] for r in shown],
        everything: [r.baseline_seconds for r in shown],
        sparse: [usual[density].baseline_seconds for density in _DENSITIES],
    }
    over_it = (r for r in live if _SEEN_BY in r.model and r.link == shown[0].link)
    seen = {r.density: r for r in over_it if "gap_s" in r.parts}
    lines = [[name, *map(milliseconds, seconds)] for name, seconds in rows.items()]
    where = (
        f"{shown[0].model} in bf16 ({shown[0].numel / 1e9:.3g} B), over {shown[0].link}: "
        f"{describe(shown[0].environment)}"
    )
    if seen:
        lines.append(_seen_by_requests(seen))
        where += f" Requests: {describe(next(iter(seen.values())).environment)}"
    titles = ("changed elements", *map(_percent, _DENSITIES))
    return f"{_tabled(titles, lines, numbers=True)}\n\n{where}"


def cells(result: Result) -> tuple[str, ...]:
    """One row, in the order of the columns."""
    is_memory = result.ratio_is == MEMORY
    has_ratio = is_memory or result.baseline_seconds > 0 or result.ratio_is == PER_PARAMETER
    ranks = ranks_of(result.link)
    model = f"{result.model}, {result.numel / 1e9:.3g} B"
    return (
        ": ".join(filter(None, (TITLES.get(result.case, result.case), result.way))),
        (model if result.model else elements(result.numel))
        + (f", {ranks[0]} + {ranks[1]} ranks" if ranks else ""),
        _percent(result.density) if result.changed != 1 else "1 element",
        mebibytes(result.bytes) if is_memory else milliseconds(result.seconds),
        mebibytes(result.bound_bytes) if is_memory else milliseconds(result.baseline_seconds),
        _ratio(result, result.ratio) if has_ratio else "",
        "" if result.goal is None else f"{_sign(result)} {_ratio(result, result.goal)}",
    )


def describe(environment: Environment) -> str:
    """Where and of what code, in a sentence."""
    e = environment
    dirty = " with uncommitted changes" if e.dirty else ""
    gpu = f"{e.gpu}; " if e.gpu else ""
    return (
        f"{gpu}{e.cpu}, {e.cores} cores, {e.capability}; Python {e.python}, torch {e.torch}, "
        f"numpy {e.numpy}; commit {e.commit[:12]}{dirty}, {e.time[:10]}."
    )


def row(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def elements(numel: int) -> str:
    return f"{numel / (1 << 20):.3g} Mi"


def milliseconds(seconds: float) -> str:
    return (
        f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 2 if seconds < 0.01 else 1}f} ms"
        if seconds
        else ""
    )


def megabytes(num_bytes: float) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.3g} GB"
    return f"{num_bytes / 1e6:.3g} MB"


def mebibytes(num_bytes: int) -> str:
    mib = num_bytes / (1 << 20)
    return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"


def ways_in(results: Iterable[Result]) -> tuple[str, str] | None:
    """The cases (against everything dense, against sparse) of whole syncs, if they were run."""
    cases = {result.case for result in results}
    return next((ways for ways in WAYS if ways[0] in cases), None)


def _gpu(results: Sequence[Result]) -> Iterator[str]:
    """Goals and results, then whole syncs by density, then where they were measured."""
    is_one_gpu = any(r.link == "CUDA IPC" for r in results)
    kept = (r for r in results if not is_one_gpu or r.case in _ON_ONE_GPU)
    shown = sorted(filter(_is_shown, kept), key=_order)
    links = {r.link: None for r in shown if r.link}
    between = "" if ways_in(shown) != next(iter(WAYS)) else "Between two processes over "
    bold = "A bold ratio misses its goal."
    yield f"{between}{'; '.join(links)}. {bold}" if links else bold
    yield _cases(r for r in shown if _is_typical(r, shown))
    yield from _by_density(shown)
    yield _environments(shown)


def _cpu(results: Sequence[Result]) -> Iterator[str]:
    """Ratios by density, then the other cases."""
    shown = [r for r in results if _is_shown(r)]
    syncs, diffs = ([r for r in shown if r.case == case] for case in ("cpu_sync", "cpu_diff"))
    yield (
        f"One thread per process, {elements(syncs[0].numel)} bf16 elements. Figures are medians "
        "of ratios; a bold figure misses its goal."
    )
    lines = [
        [TITLES[rows[0].case], _goals(rows), *(_bold(f"{r.ratio:.2f}x", r.met) for r in rows)]
        for rows in (diffs, syncs)
    ]
    lines.append(["whole sync", "", *(milliseconds(r.seconds) for r in syncs)])
    lines.append(["bytes sent", "", *(megabytes(r.bytes) for r in syncs)])
    yield _tabled(("", "goal", *(_percent(r.density) for r in syncs)), lines, texts=2, numbers=True)
    yield _cases(r for r in shown if not r.case.startswith("cpu_"))
    yield _environments(shown)


def _live(results: Sequence[Result]) -> Iterator[str]:
    """One share of changed elements, of servers and of a quantized engine."""
    shown = [r for r in results if _SEEN_BY in r.model or "FP8" in r.model]
    shown = [r for r in shown if r.case == "live_changed" and r.density == _DENSITIES[0]]
    yield (
        "Medians of syncs by turns; in brackets, with updates in several calls. The gaps are the "
        "longest without a token of any request: around a sync, and in 0.1 s before it. After a "
        "sync, vLLM recomputes the keys and values of running requests, unless they are kept."
    )
    titles = ["engine", "sync", "whole sync", "calls", "staging", "write"]
    titles += ["longest gap between tokens", "with keys kept", "usual gap"]
    titles += ["tokens/s without syncs", "with one each second", "with keys kept", "without again"]
    yield _tabled(titles, map(_live_cells, shown))
    yield _environments(shown)


def _live_cells(result: Result) -> Iterator[str]:
    parts = result.parts

    def both(key: str, scale: float = 1e3, unit: str = " ms") -> str:
        return f"{parts[key] * scale:.3g} ({parts[f'several_{key}'] * scale:.3g}){unit}"

    yield from (result.model, f"{100 * result.density:g} % changed", both("total_s"))
    yield from (both("calls", 1, ""), both("staging_s"), both("write_s"), both("gap_s"))
    yield from (f"{1e3 * parts['kept_gap_s']:.3g} ms", both("usual_gap_s"))
    rates = ("before", "paced", "kept_paced", "after")
    yield from (f"{parts[f'{key}_tokens_per_s']:.0f}" for key in rates)


def _codec(results: Sequence[Result]) -> Iterator[str]:
    """Bytes by learning rate and by form, then speeds."""
    plain = [f"masters-1e-{rate}-k1" for rate in (7, 6, 5)]
    served = [f"masters-1e-6-k8-{form}" for form in ("block-fp8", "nvfp4", "int4")]
    largest = max(r.numel for r in results)
    by_pair = {pair: [r for r in results if r.model == pair] for pair in (*plain, *served)}
    shown = [r for pair in by_pair.values() for r in pair]
    yield (
        "Bytes per changed element, all headers and tables counted; a bold figure misses its "
        f"goal. The model has {largest / 1e6:.0f} M elements."
    )
    yield (
        "By learning rate, one step between syncs. fp32 masters begin at a bf16 checkpoint, ten "
        "steps before."
    )
    yield _bytes({pair.split("-k")[0].removeprefix("masters-"): by_pair[pair] for pair in plain})
    yield "What engines serve of the matrices of the model's blocks:"
    forms = {pair: pair.split("-k8-")[1] for pair in served}
    yield _bytes({f"{forms[pair]}, 1e-6, 8 steps": by_pair[pair] for pair in served})
    speeds = by_pair["masters-1e-6-k1"]
    yield (
        "Speeds on one thread at 1e-6, one step: millions of changes, and bytes of dense weights, "
        f'in a second; in brackets relative to "{speeds[0].baseline}". They begin with the changes '
        "found and end with positions and new values checked."
    )
    titles = ("", "encode, M changes/s", "encode, MB/s", "decode, M changes/s", "decode, MB/s")
    lines = [[*_speeds(r), _speed_goal(r)] for r in speeds]
    head, rule, *rest = _tabled((*titles, "goal"), lines, numbers=True).split("\n")
    yield "\n".join([head, rule.removesuffix("---:|") + "---|", *rest])
    yield "\n".join(
        dict.fromkeys(f"{describe(r.environment)[:-1]}; zstd {r.environment.zstd}." for r in shown)
    )


def _bytes(by_title: dict[str, list[Result]]) -> str:
    """One row a coder, one column a pair."""
    lines = [["changed", *(_percent(pair[0].density) for pair in by_title.values())]]
    lines += [
        [found[0].way, *(_bold(f"{r.ratio:.3f}", r.met) for r in found)]
        for found in zip(*by_title.values(), strict=True)
    ]
    return _tabled(("", *by_title), lines, numbers=True)


def _speeds(result: Result) -> Iterator[str]:
    yield result.way
    least, unit = CODEC_SPEEDS.get(result.way.removeprefix("deltasync: "), (0.0, ""))
    for way, seconds in (("encode", result.seconds), ("decode", result.parts["decode_s"])):
        changes, dense = result.changed / seconds, result.bound_bytes / seconds
        met = result.goal is None or (dense if unit == "MB/s" else changes) >= least
        yield _bold(f"{changes / 1e6:.3g} ({result.parts[f'{way}_ratio']:.2f}x)", met)
        yield _bold(f"{dense / 1e6:,.0f}", met)


def _speed_goal(result: Result) -> str:
    least, unit = CODEC_SPEEDS.get(result.way.removeprefix("deltasync: "), (0.0, ""))
    return f">= {least / 1e6:.0f} {unit}" if unit and result.goal is not None else ""


def _store(results: Sequence[Result]) -> Iterator[str]:
    """The last pair of versions, over the slower links."""
    last = results[-1]
    shown = [r for r in results if r.model == last.model and r.link != "10 Gbit/s"]
    yield (
        f"`{last.model}`: {_percent(last.density)} of {last.numel / 1e6:.0f} M bf16 elements "
        f"changed, a checkpoint of {megabytes(last.bound_bytes)}. Medians, in seconds:"
    )
    titles = ("link", "way", "publish", "fetch, commit", "together", "of the checkpoint's time")
    lines = [
        [
            *(r.link, r.way, f"{r.parts['publish_s']:.3g}", f"{r.parts['fetch_s']:.3g}"),
            *(f"{r.seconds:.3g}", "" if r.way == r.baseline else f"1/{r.ratio:.3g}"),
            *(megabytes(r.bytes), megabytes(r.parts["down_bytes"])),
        ]
        for r in shown
    ]
    yield _tabled((*titles, "up", "down"), lines, texts=2, numbers=True)
    yield _environments(shown)


def _by_density(shown: Sequence[Result]) -> Iterator[str]:
    """Whole syncs: one row a way, one column a density; for each link with several densities."""
    if (ways := ways_in(shown)) is None:
        return
    links = Counter(r.link for r in shown if r.case == ways[0])
    for link in (link for link, densities in links.items() if densities > 1):
        dense, usual = (
            {r.density: r for r in shown if r.case == case and r.link == link} for case in ways
        )
        everything, sparse = WAYS[ways]
        rows = list(dense.values())
        lines = [
            ["deltasync", *(milliseconds(r.seconds) for r in rows)],
            ["engine paused", *(milliseconds(r.parts["pause_s"]) for r in rows)],
            [everything, *(milliseconds(r.baseline_seconds) for r in rows)],
            [sparse, *(milliseconds(usual[d].baseline_seconds) for d in dense)],
            ["bytes deltasync sends", *(megabytes(r.bytes) for r in rows)],
        ]
        yield f"Whole syncs of {rows[0].model} by share of changed elements ({link}):"
        yield _tabled(("", *map(_percent, dense)), lines, numbers=True)


def _seen_by_requests(live: dict[float, Result]) -> list[str]:
    """A row of the summary: gaps between tokens around a sync, and in brackets the usual ones."""
    found = [f"longest gap between tokens of {_SEEN_BY} (and without a sync)"]
    for density in _DENSITIES:
        parts = live[density].parts if density in live else {}
        gap, usual = parts.get("gap_s"), parts.get("usual_gap_s")
        found.append(f"{milliseconds(gap)} ({milliseconds(usual)})" if gap and usual else "")
    return found


def _cases(results: Iterable[Result]) -> str:
    lines = []
    for result in results:
        *texts, ratio, goal = cells(result)
        lines.append([*texts, _bold(ratio, result.met), goal])
    return _tabled(_COLUMNS, lines)


def _tabled(
    titles: Sequence[str], lines: Iterable[Iterable[str]], *, texts: int = 1, numbers: bool = False
) -> str:
    """Columns after the first few are aligned to the right if they hold `numbers`."""
    kinds = ["---:" if numbers and n >= texts else "---" for n in range(len(titles))]
    return "\n".join((row(titles), f"|{'|'.join(kinds)}|", *map(row, lines)))


def _environments(results: Iterable[Result]) -> str:
    return "\n".join(dict.fromkeys(describe(r.environment) for r in results))


def _is_shown(result: Result) -> bool:
    """Whether a section has it: no case, density or size that says the same once more."""
    case = result.case
    if case.startswith(_LEFT_OUT):
        return False
    if case.startswith("memory_"):
        return result.density == 1.0
    if case == "sharded_large":
        return result.numel >= 1 << 34
    if case == "files" or case.startswith("sharded_"):
        return result.density == 0.01
    swept = case.startswith(("sync_", "diff", "cpu_"))
    return not swept or result.density in _DENSITIES


def _is_typical(result: Result, shown: Sequence[Result]) -> bool:
    """Of a sweep the record nearest to a typical density, with a goal if one has."""
    if not result.case.startswith(_SWEPT):
        return True
    key = result.case, result.model, result.link
    same = [r for r in shown if (r.case, r.model, r.link) == key]
    return result is min(same, key=lambda r: (r.goal is None, abs(r.density - _TYPICAL_DENSITY)))


def _order(result: Result) -> tuple[object, ...]:
    order = list(TITLES).index(result.case)
    return order, result.link, result.numel, result.density


def _goals(results: Sequence[Result]) -> str:
    """Each goal, with the density up to which it applies if it does not apply to all."""
    last = {r.goal: r.density for r in results if r.goal is not None}
    texts = [
        f"{_sign(results[0])} {goal:g}"
        + ("" if density == results[-1].density else f" to {_percent(density)}")
        for goal, density in last.items()
    ]
    return ", ".join(texts)


def _ratio(result: Result, value: float) -> str:
    match result.ratio_is:
        case "microseconds / parameter":
            return f"{value:.3g} us per parameter"
        case "baseline_seconds / seconds":
            return f"{value:.2f}x as fast"
        case "seconds / baseline_seconds":
            return f"{value:.2f}x the time"
        case "bytes / bound_bytes":
            return f"{value:.2f} of the bound"
        case "bytes / changed":
            return f"{value:.3f} bytes per change"


def _percent(density: float) -> str:
    return f"{100 * density:.3g} %"


def _bold(text: str, met: bool) -> str:
    return text if met else f"**{text}**"


def _sign(result: Result) -> str:
    return ">=" if result.ratio_is == SPEED_UP else "<="


def _alt(image: str) -> str:
    """What the image shows, by the end of its name."""
    return {
        "bytes": "Bytes per changed element by share of changed elements",
        "requests": "Gaps between tokens, and tokens per second, with syncs and without",
        "sync": "Whole-sync time by share of changed elements",
    }[image.removesuffix(".svg").rpartition("-")[2]]
