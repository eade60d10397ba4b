"""Pairs of a real optimization, and codecs on them, at toy size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.codec.bounds import bounds_of
from benchmarks.codec.change import change_of, same
from benchmarks.codec.pairs import BFLOAT16, Pair, main, names, pairs, read_pairs
from benchmarks.codec.plots import draw_all
from benchmarks.codec.record import CodecRecord, append_records, read_records
from benchmarks.codec.report import make_markdown, make_table
from benchmarks.codec.runner import LostBits, coders, measure, measure_pair
from benchmarks.codec.shapes import Absolute, Gaps, Positions, RowsAndColumns
from benchmarks.codec.text import Text
from benchmarks.codec.training import SIZES, Training
from deltasync.delta.bits import as_bits


@pytest.fixture(scope="module")
def made() -> dict[str, Pair]:
    return {pair.name: pair for pair in pairs("tiny")}


def test_pairs_are_all_that_were_planned(made: dict[str, Pair]) -> None:
    assert list(made) == names("tiny")
    assert "masters-1e-4-k1-int4" in made


def test_some_elements_change_and_most_do_not(made: dict[str, Pair]) -> None:
    pair = made["masters-1e-6-k1"]
    changed = [(pair.old[name] != new).sum() for name, new in pair.new.items()]
    numel = sum(new.numel() for new in pair.new.values())
    assert 0 < sum(changed) < 0.05 * numel


def test_the_same_pairs_come_again(made: dict[str, Pair]) -> None:
    (again,) = pairs("tiny", ["bf16-1e-4-k1"])
    first = made["bf16-1e-4-k1"]
    assert all(torch.equal(again.new[name], first.new[name]) for name in first.new)


def test_pairs_are_read_as_they_were_written(made: dict[str, Pair], tmp_path: Path) -> None:
    name = "masters-1e-4-k1-nvfp4"
    main("tiny", str(tmp_path), name)
    (pair,) = read_pairs("tiny", tmp_path, [name])
    assert pair.name == name
    assert all(torch.equal(as_bits(one), as_bits(made[name].new[n])) for n, one in pair.new.items())


def test_the_model_learns() -> None:
    losses = Training(SIZES["tiny"]).losses
    assert losses[-1] < losses[0]


def test_text_follows_its_own_rules() -> None:
    text = Text.of(64)
    pieces = text.windows(200, torch.Generator().manual_seed(0))
    prompts, answers = pieces[:, : text.prompt_length], pieces[:, text.prompt_length :]
    rewards = text.rewards(prompts, answers)
    assert 0.6 < rewards.mean() < 0.95
    assert torch.equal(text.successors, Text.of(64).successors)


@pytest.fixture(scope="module")
def records() -> list[CodecRecord]:
    return list(measure("tiny"))


def test_every_coder_is_measured_on_every_pair(records: list[CodecRecord]) -> None:
    found = [(record.pair, record.coder) for record in records]
    assert found == [(pair, coder.name) for pair in names("tiny") for coder in coders()]


def test_a_coder_that_loses_bits_is_found(
    made: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gaps, "indices", lambda self, streams, cols: streams[0].astype(np.int32))
    with pytest.raises(LostBits, match="NeMo-RL"):
        list(measure_pair(made["masters-1e-4-k1"], rounds=1))


def test_few_bytes_stay_above_their_bound(records: list[CodecRecord]) -> None:
    for record in records:
        assert 0 < record.known_bound_bytes <= record.bound_bytes
        assert record.bytes > record.known_bound_bytes
    found = {(record.pair, record.coder): record.bytes for record in records}
    for pair in names("tiny"):
        assert found[pair, "gap, ulp, zstd"] < found[pair, "raw, zstd"] < found[pair, "raw"]


def test_records_are_read_as_they_were_written(records: list[CodecRecord], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert list(append_records(path, records)) == records
    assert read_records(path) == records


def test_tables_and_the_plot_show_every_coder(records: list[CodecRecord], tmp_path: Path) -> None:
    text, table = make_markdown(records), make_table(records)
    assert all(coder.name in text for coder in coders())
    assert table.row_count == len(names("tiny")) * (len(coders()) + 3)
    (path,) = draw_all(records, tmp_path)
    assert path.stat().st_size > 1000


def test_the_command_prints_json_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ["codec", "--tiny", "--json", "--only", "masters-1e-6-k1", "--out", str(out)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert [CodecRecord.from_json(line) for line in done.stdout.splitlines()] == read_records(out)


@pytest.mark.parametrize("positions", [Absolute(), Gaps(2), Gaps(4), RowsAndColumns()])
@pytest.mark.parametrize("indices", [[0], [69_999], [0, 1, 2], [6, 7, 13, 14, 69_998, 69_999]])
@pytest.mark.parametrize("cols", [1, 7, 70_000])
def test_positions_come_back(positions: Positions, indices: list[int], cols: int) -> None:
    given = np.array(indices, np.int32)
    assert same([positions.indices(positions.streams(given, cols), cols)], [given])


def test_a_bound_is_the_entropy() -> None:
    old = torch.zeros(1024, dtype=torch.bfloat16)
    new = old.clone()
    new[::2] = torch.tensor(2.0**-133)  # the smallest number: one step
    pair = Pair(kept="bf16", lr=1e-6, steps=1, form=BFLOAT16, old={"w": old}, new={"w": new})
    bounds = bounds_of(change_of(pair))
    assert bounds.unknown == bounds.known == 1024 / 8
