"""``moonpool bench migrate`` measures what it says, and writes it down."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.harness.goals import with_goals
from moonpool.bench.migrate.command import with_positions
from moonpool.bench.migrate.downtime import Moved, moved, rows_of
from moonpool.bench.serve.client.answer import Answer
from moonpool.runtime.config.options import ModelOptions
from moonpool.runtime.reports import report


def test_the_gap_of_a_move_is_next_to_the_targets_first_token() -> None:
    # Some tokens of the source, a pause; its last token comes with two of the target.
    times_s = (1.0, 1.1, 1.2, 1.3, 1.8, 1.9, 2.0, 2.1, 2.4, 2.4, 2.4, 2.5, 2.6)
    found = moved(Answer(0.0, 3.0, times_s, output_tokens=13), 1.45, 2.41, {"first_index": 9})
    assert found.gap_s == pytest.approx(0.3)
    assert found.longest_s == pytest.approx(0.5)  # while it still ran on its source
    assert found.other_gaps_s == pytest.approx([0.1] * 4)
    assert found.step_s == pytest.approx(0.1)


def test_the_goal_is_three_steps_and_five_ms() -> None:
    facts = {"downtime_s": 0.0, "stopped_s": 0.0, "num_blocks": 128}
    facts |= {"stages": 2, "num_last_blocks": 2, "num_local_blocks": 0, "nbytes": 1 << 20}
    for gap_s, reached in ((0.010, True), (0.012, False)):
        rows = rows_of(2048, [Moved(0.002, gap_s, gap_s, [0.002], 0.1, facts)], 1)
        (row,) = [row for row in with_goals("migrate", rows) if row.limit is not None]
        assert row.metric == "downtime p99 beyond 3 steps, client"
        assert row.reached is reached


def test_a_model_of_too_few_positions_gets_more(tmp_path: Path) -> None:
    shipped = ModelOptions().directory
    assert with_positions(shipped, 4096, tmp_path) == shipped
    directory = with_positions(shipped, 10_000, tmp_path)
    assert json.loads((directory / "config.json").read_text())["max_position_embeddings"] == 10_000
    assert {file.name for file in directory.iterdir()} == {file.name for file in shipped.iterdir()}


def test_a_load_with_and_without_moves_is_simulated(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["migrate", "--quick", "--part", "simulated", "--json", str(file)]
    result = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    ours = {row["metric"]: row for row in content["rows"] if row["case"].startswith("requests move")}
    for metric in ("TTFT", "TBT, longest tenth of a request", "whole answer"):
        assert ours[metric]["peer"] == ours[f"{metric}, p99"]["peer"] == "requests stay"


@pytest.mark.slow
async def test_moves_of_a_small_cluster_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["migrate", "--quick", "--part", "downtime", "--json", str(file)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    found = {row["metric"]: row["value"] for row in content["rows"]}
    assert found["moves"] >= 1
    # 512 tokens are 32 blocks of 16 at least, all of them read.
    assert found["blocks read, mean"] + found["blocks there already, mean"] >= 32
    assert found["blocks read while it stood still, mean"] >= 1
    assert found["a whole move"] > 0
    assert found["reads, mean"] >= 2


@pytest.mark.slow
async def test_a_load_with_and_without_moves_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["migrate", "--quick", "--part", "tail", "--slo-tbt", "0.5", "--json", str(file)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    ours = {row["metric"]: row for row in content["rows"] if row["case"].startswith("requests move")}
    for metric in ("TTFT, streams", "second token, long prompts", "TBT, streams"):
        assert ours[metric]["peer"] == ours[f"{metric}, p99"]["peer"] == "requests stay"
        assert ours[metric]["p99"] == ours[f"{metric}, p99"]["value"]
    assert {"moves: defragment", "moves: hot-spot", "moves: priority"} <= ours.keys()
