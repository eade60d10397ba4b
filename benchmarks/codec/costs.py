"""`python -m benchmarks codec-costs`: what codings cost on this machine, for compression="auto".

Costs of deltas are fitted to the records of `python -m benchmarks codec`; what a full sync costs is
measured here, on the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.codec.pairs import BFLOAT16, pairs
from benchmarks.codec.record import RECORDS, CodecRecord, read_records
from benchmarks.record import RESULTS, Environment
from benchmarks.record import read_records as read_results
from benchmarks.report import describe
from benchmarks.timing import interleave
from deltasync.delta.codecs.choosing import CodingCost, CodingCosts, Work, cheapest
from deltasync.delta.codecs.coding import Coding
from deltasync.wire.compression import compress, decompress

COSTS = RESULTS / "coding-costs-cpu.json"
ON_GPUS = RESULTS / "codec-gpu.jsonl"
ENDS: Mapping[Coding, tuple[tuple[str, str], ...]] = {
    "block": (("codec_block_encode", "encode_s"), ("codec_block_write", "decode_s")),
    "class": (("codec_class", "encode_s"), ("codec_class", "decode_s")),
}
"""Of codecs that work on GPUs: the case and the part of it that each end takes."""

CODERS: Mapping[str, Coding] = {
    "raw, zstd": "zstd",
    "gap, ulp, zstd": "gap",
    "block": "block",
    "class": "class",
}
"""Codings by the names that records have; "raw" is none."""

DENSITIES = (0.001, 0.01, 0.1)
SPEEDS = np.logspace(3, 11, 4001)  # bytes a second
NONE = CodingCost(change_ns=0.0, element_ns=0.0, share=1.0, halving=0.0)
_RAW_BYTES = 6  # of a changed bfloat16 element, as it is packed
_PAIR = "masters-1e-6-k1"
_ROUNDS = 40


def codec_costs(
    record: Annotated[
        bool, typer.Option("--record", help="Keep them in benchmarks/results.")
    ] = False,
    scale: Annotated[str, typer.Option(help="Whose weights full syncs have.")] = "quick",
    on_gpus: Annotated[
        bool, typer.Option("--gpu", help="Of weights on a GPU, from the records; nothing is timed.")
    ] = False,
) -> None:
    """Fit what codings cost to the records of `codec`, for the table of compression="auto"."""
    if on_gpus:
        costs = gpu_costs()
        print(costs.model_dump_json(indent=1))
        _print_switches(costs)
        return
    records = [one for one in read_records(RECORDS) if one.form == BFLOAT16]
    whole = measure_whole(scale)
    costs = CodingCosts(machine=describe(records[0].environment), deltas=fit(records), whole=whole)
    text = costs.model_dump_json(indent=1)
    print(text)
    print(f"full syncs: {describe(Environment.here())}")
    _print_switches(costs)
    if record:
        COSTS.write_text(text + "\n", encoding="utf-8")


def gpu_costs() -> CodingCosts:
    """The costs of weights on a GPU, by what is recorded of codecs there and on hosts.

    Bytes are those of real training, from the records of `codec`. What no GPU codes is coded on the
    host; that its payloads come from the GPU and go back is left out.
    """
    hosts = CodingCosts.model_validate_json(COSTS.read_text(encoding="utf-8"))
    results = read_results(ON_GPUS)
    by_case = {(one.case, one.density): one for one in results}
    deltas = dict(hosts.deltas)
    for coding, ends in ENDS.items():
        ones = [one for one in results if one.case == ends[0][0]]
        seconds = np.array(
            [sum(by_case[case, one.density].parts[part] for case, part in ends) for one in ones]
        )
        terms = np.array([[one.changed for one in ones], [one.numel for one in ones]])
        bytes_of = deltas[coding]
        deltas[coding] = _cost(*_relative(terms, 1e9 * seconds), bytes_of.share, bytes_of.halving)
    machine = describe(results[0].environment)
    return CodingCosts(machine=machine, deltas=deltas, whole=hosts.whole)


def _print_switches(costs: CodingCosts) -> None:
    for density in DENSITIES:
        fastest = ", ".join(
            f"{coding} up to {speed:.3g} Gbit/s" for coding, speed in switches(costs, density)
        )
        print(f"{density:.1%} changed: {fastest}; none above")


def switches(costs: CodingCosts, density: float) -> list[tuple[Coding, float]]:
    """(coding, Gbit/s of the fastest link that it is chosen for), but for "none", slowest first."""
    numel = 100_000_000
    raw_bytes = int(_RAW_BYTES * density * numel)
    work = Work(density * numel, numel, raw_bytes, raw_bytes, is_full=False)
    fastest = {cheapest(work, float(speed), costs): float(speed) for speed in SPEEDS}
    return [(coding, speed / 125e6) for coding, speed in fastest.items() if coding != "none"]


def fit(records: Sequence[CodecRecord]) -> dict[Coding, CodingCost]:
    """The costs of deltas that fit records best, by relative squares.

    Times are those beyond a payload as it is packed, which every coding begins and ends with.
    Other work on a machine only adds time, so the fastest of the rounds counts.
    """
    by_pair = {(one.pair, one.coder): one for one in records}
    pairs_of = list(dict.fromkeys(one.pair for one in records))
    found: dict[Coding, CodingCost] = {"none": NONE}
    for coder, coding in CODERS.items():
        found[coding] = _fit_one(
            [(by_pair[pair, coder], by_pair[pair, "raw"]) for pair in pairs_of]
        )
    return found


def measure_whole(scale: str) -> dict[Coding, CodingCost]:
    """The costs of full syncs: of all weights, compressed or not."""
    (pair,) = pairs(scale, [_PAIR])
    data = torch.cat([one.view(-1).view(torch.uint8) for one in pair.old.values()]).numpy()
    coded = compress(data.data)

    def there_and_back() -> None:
        decompress(compress(data.data), compression="zstd", raw_bytes=len(data))

    samples = interleave({"zstd": there_and_back}, rounds=_ROUNDS)["zstd"]
    numel = sum(one.numel() for one in pair.old.values())
    each = 1e9 * min(samples) / numel
    return {"none": NONE, "zstd": _cost(each, 0.0, len(coded) / len(data), 0.0)}


def _fit_one(records: Sequence[tuple[CodecRecord, CodecRecord]]) -> CodingCost:
    """Of (what a coder made of a pair, the pair as it is packed)."""
    changed, numel, shares, seconds = np.array(
        [
            (
                one.changed,
                one.numel,
                one.bytes_each / _RAW_BYTES,
                max(_fastest_s(one) - _fastest_s(packed), 1e-9),
            )
            for one, packed in records
        ]
    ).T
    halvings = np.log2(numel / changed)
    share, halving = _relative(np.stack([np.ones_like(halvings), halvings]), shares)
    change_ns, element_ns = _relative(np.stack([changed, numel]), 1e9 * seconds)
    return _cost(change_ns, element_ns, share, halving)


def _fastest_s(record: CodecRecord) -> float:
    return min(record.encode_samples) + min(record.decode_samples)


def _relative(terms: NDArray[Any], values: NDArray[Any]) -> tuple[float, float]:
    """The factors of two terms, at least 0, that sum up to the values best."""
    found, *_ = np.linalg.lstsq((terms / values).T, np.ones_like(values), rcond=None)
    first, second = np.maximum(found, 0.0)
    return float(first), float(second)


def _cost(change_ns: float, element_ns: float, share: float, halving: float) -> CodingCost:
    numbers = {
        "change_ns": change_ns,
        "element_ns": element_ns,
        "share": share,
        "halving": halving,
    }
    return CodingCost(**{name: float(f"{number:.3g}") for name, number in numbers.items()})
