"""The GPU benchmarks run on a CPU at toy size; how long anything takes is not asserted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.__main__ import IMAGES, PAGE, README, app
from benchmarks.gpu import baselines, report
from benchmarks.gpu.cases import Run
from benchmarks.gpu.exchange import SharedBuffer
from benchmarks.gpu.geometry import GEOMETRIES
from benchmarks.gpu.plots import draw_all
from benchmarks.gpu.setup import SCALES, Setup
from benchmarks.gpu.worker import GROUPS, run_groups
from benchmarks.gpu.workload import Training, mutate
from benchmarks.record import MEMORY, Result, read_records
from benchmarks.workload import bits_of

CPU = torch.device("cpu")
TINY = GEOMETRIES["tiny"]

pytestmark = pytest.mark.timeout(300)  # whichever is first waits for all benchmarks


@dataclass
class Runs:
    """Records and failures of two runs at once: on one device, and over a process group."""

    results: list[Result]
    failures: list[str]
    printed: str
    kept: list[Result]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = tmp_path_factory.mktemp("gpu") / "records.jsonl"
    failures: list[str] = []
    groups = ["no such group", *(group for group in GROUPS if group != "adamw")]
    others = ["--only", "sync", "--only", "adamw", "--only", "large"]
    where = ["--device", "cpu", "--geometry", "tiny", "--link", "collective"]
    with ThreadPoolExecutor(1) as pool:
        local = pool.submit(
            lambda: list(run_groups(Setup.choose("full", "tiny", "cpu"), groups, failures))
        )
        done = CliRunner().invoke(app, ["gpu", "--json", "--out", str(path), *others, *where])
        assert done.exit_code == 0, done.output
        return Runs(local.result(), failures, done.stdout, read_records(path))


@pytest.fixture(scope="module")
def results(runs: Runs) -> list[Result]:
    return runs.results


def test_a_group_that_fails_is_reported_and_the_rest_goes_on(runs: Runs) -> None:
    assert runs.failures == ["no such group: its process ended with 1"]
    assert runs.results


def test_what_is_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise torch.OutOfMemoryError("no room")

    run = Run(Setup.choose("full", "tiny", "cpu"), pytest.fail)
    assert run.attempt("this", lambda: 1) == 1
    assert not run.failed
    assert run.attempt("that", fail) is None
    assert run.failed
    assert "that failed and is left out" in capsys.readouterr().err


def test_every_case_is_measured(results: list[Result]) -> None:
    elsewhere = {
        "adamw",
        "large",
        "large_over_dense",
        "diff_host_snapshot",
        "receivers_7",
        *(case for case in report.TITLES if case.startswith("codec_nvcomp")),
    }  # "large" needs two devices, "receivers_7" eight
    assert {r.case for r in results} | elsewhere == set(report.TITLES)
    assert {(r.model, r.numel) for r in results if r.case == "commit_growth"} == {
        (name, GEOMETRIES[name].numel) for name in SCALES["tiny"].commits
    }


def test_records_say_what_was_done(results: list[Result]) -> None:
    for result in results:
        assert result.seconds > 0
        assert 0 < result.changed <= result.numel
        assert result.goal is None
        assert result.model
        if result.ratio_is == MEMORY:
            assert result.bound_bytes > 0
        else:
            assert result.baseline
        if result.case.startswith("quant_diff"):
            assert {"capture_s", "first_s", "call_s"} <= result.parts.keys()


def test_both_ends_meet_in_a_group_too(runs: Runs) -> None:
    assert [Result.from_json(line) for line in runs.printed.splitlines()] == runs.kept
    cases = {"sync_over_dense", "sync_over_usual", "adamw", "large_over_dense"}
    assert cases < {r.case for r in runs.kept}
    assert {r.link for r in runs.kept} == {"gloo"}


@pytest.mark.parametrize(
    ("geometry", "device", "link"),
    [("no such", "cpu", None), ("tiny", "tpu", None), ("tiny", "cpu", "wifi")],
)
def test_wrong_setups_are_refused(geometry: str, device: str, link: str | None) -> None:
    with pytest.raises(ValueError, match="is n"):
        Setup.choose("full", geometry, device, link)


@pytest.mark.parametrize(
    ("name", "parameters", "numel"),
    [
        ("qwen3-1.7b", 310, 1_720_574_976),
        ("qwen3-8b", 399, 8_190_735_360),
        ("qwen3-30b-a3b", 18_867, 30_532_122_624),
    ],
)
def test_geometries_are_those_of_the_models(name: str, parameters: int, numel: int) -> None:
    geometry = GEOMETRIES[name]
    assert (len(geometry.shapes()), geometry.numel) == (parameters, numel)


@pytest.mark.parametrize(("name", "parameters"), [("moe-small", 18_866), ("kimi-small", 69_915)])
def test_many_parameters_hold_as_many_bytes_as_few(name: str, parameters: int) -> None:
    few, many = GEOMETRIES["qwen3-1.7b"], GEOMETRIES[name]
    assert len(many.shapes()) == parameters
    assert 0.99 < many.numel / few.numel < 1.01


def test_commit_models_grow_sixteenfold() -> None:
    sizes = [GEOMETRIES[name] for name in SCALES["full"].commits]
    assert sizes[-1].numel == pytest.approx(16 * sizes[0].numel, rel=0.01)
    assert len({len(geometry.shapes()) for geometry in sizes}) == 1


@pytest.mark.parametrize("density", [0.01, 0.2, 1.0])
def test_mutations_repeat_themselves_and_change_their_share(density: float) -> None:
    module = TINY.build(CPU)
    before = torch.cat([bits.clone() for bits in bits_of(module)])
    mutate(module, density, seed=3)
    changed = (torch.cat(bits_of(module)) != before).float().mean().item()
    assert 0.9 * density < changed <= 1.1 * density
    mutate(module, density, seed=3)
    assert torch.equal(torch.cat(bits_of(module)), before)


def test_weights_follow_their_masters() -> None:
    module = TINY.build(CPU)
    training = Training(module)
    before = [bits.clone() for bits in bits_of(module)]
    training.step()
    changed = sum(int((a != b).sum()) for a, b in zip(bits_of(module), before, strict=True))
    assert 0 < changed < TINY.numel / 5
    for weight, master in zip(training.weights, training.masters, strict=True):
        assert torch.equal(weight, master.detach().bfloat16())


def test_buckets_cover_all_and_stay_small() -> None:
    for numels, limit in product(([], [7], [3, 4, 5, 1, 9, 1]), (1, 5, 8, 100)):
        parts = list(baselines.buckets(numels, limit))
        assert [n for part in parts for n in numels[part]] == numels
        assert all(sum(numels[p]) <= limit or len(numels[p]) == 1 for p in parts)


def filled_engine(weights: list[Tensor]) -> baselines.FusedModel:
    engine = baselines.FusedModel(TINY.shapes(), CPU)
    for part, weight in zip(engine.parts.values(), weights, strict=True):
        part.copy_(weight.view_as(part))
    return engine


def test_the_usual_sparse_way_arrives_at_the_same_bits() -> None:
    module = TINY.build(CPU)
    old = [bits.clone() for bits in bits_of(module)]
    engine = filled_engine([bits.view(torch.bfloat16) for bits in old])
    assert "model.layers.0.self_attn.q_proj.weight" in engine.parts
    mutate(module, 0.02, seed=1)
    found = baselines.find_changes(bits_of(module), old)
    memory = torch.zeros(6 * TINY.numel, dtype=torch.uint8)
    baselines.give_sparse(found, SharedBuffer(memory))
    taken = baselines.take_sparse([len(i) for i, _ in found], SharedBuffer(memory))
    baselines.apply_through_nan(engine, TINY.shapes(), taken)
    baselines.give_dense([p.detach().view(-1) for p in module.parameters()], SharedBuffer(memory))
    assert baselines.differing(list(engine.parts.values()), SharedBuffer(memory)) == 0
    next(iter(engine.parts.values()))[0, 0] += 1
    assert baselines.differing(list(engine.parts.values()), SharedBuffer(memory)) == 1


def test_the_page_gets_tables_and_images(results: list[Result], tmp_path: Path) -> None:
    text = report.make_markdown(results)
    assert all(report.TITLES[r.case] in text for r in results)
    page = "before\n<!-- begin x -->\noutdated\n<!-- end x -->\nafter\n"
    once = report.insert(page, "x", text, ["images/x-sync.svg"])
    assert "outdated" not in once
    assert "](images/x-sync.svg)" in once
    assert "![]" not in once
    assert report.insert(once, "x", text, ["images/x-sync.svg"]) == once
    with pytest.raises(ValueError, match="no place"):
        report.insert(page, "y", text)
    paths = draw_all(results, tmp_path, name="gpu-x")
    assert [path.name for path in paths] == ["gpu-x-sync.svg", "gpu-x-commit.svg"]


def test_codecs_are_drawn_by_density(results: list[Result], tmp_path: Path) -> None:
    rows = [r for r in results if r.case.startswith("codec_block")]
    swept = [replace(r, density=density) for r in rows for density in (0.001, 0.01)]
    assert [path.name for path in draw_all(swept, tmp_path, name="gpu-x")] == ["gpu-x-codec.svg"]
    assert all({"encode_s", "decode_s"} & r.parts.keys() for r in rows)
    assert all(r.bytes < r.bound_bytes / 2 for r in rows)


def test_pages_hold_what_the_records_give(tmp_path: Path) -> None:
    pages = {}
    for page in (PAGE, README):
        pages[page] = tmp_path / page.name
        pages[page].write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "images").mkdir()
    for image in IMAGES.glob("*.svg"):
        (tmp_path / "images" / image.name).touch()
    done = CliRunner().invoke(
        app, ["report", "--page", str(pages[PAGE]), "--readme", str(pages[README])]
    )
    assert done.exit_code == 0, done.output
    for page, copy in pages.items():
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
