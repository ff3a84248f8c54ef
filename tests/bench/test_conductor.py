"""The conductor's benchmark: a made-up cluster, and a real conductor."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.conductor.command import conductor
from moonpool.bench.conductor.decisions import BLOCK_SIZE, CHAIN_BLOCKS, Population
from moonpool.runtime.reports.report import read


def test_decisions_fall_on_nodes_of_both_roles_and_use_what_is_held() -> None:
    population = Population(32, 10_000, "goodput")
    assert population.num_blocks == 10_000 // CHAIN_BLOCKS * CHAIN_BLOCKS
    placements = [population.decide(population.request(), 1e-3 * i) for i in range(200)]
    assert {placement.prefill.node_id[0] for placement in placements} == {"p"}
    assert {placement.decode.node_id[0] for placement in placements if placement.decode} == {"d"}
    assert any(placement.prefill.prefix_tokens for placement in placements)
    assert all(p.prefill.prefix_tokens <= CHAIN_BLOCKS * BLOCK_SIZE for p in placements)


def test_the_same_seed_decides_alike() -> None:
    def decisions() -> list[str]:
        population = Population(100, 10_000, "goodput", seed=3)
        return [population.decide(population.request(), 1e-3 * i).prefill.node_id for i in range(50)]

    assert decisions() == decisions()


@pytest.mark.parametrize("option", ["--decisions=0", "--requests=0"])
def test_no_decisions_or_requests_are_refused(option: str) -> None:
    result = CliRunner().invoke(conductor, ["--part", "scale", "--part", "http", "--quick", option])
    assert (result.exit_code, option.partition("=")[0] in result.output) == (2, True), result.output


@pytest.mark.slow
def test_costs_are_drawn(tmp_path: Path) -> None:
    picture, file = tmp_path / "plot.png", tmp_path / "report.json"
    options = [
        "--part",
        "scale",
        "--part",
        "matching",
        "--quick",
        "--decisions",
        "20",
        "--plot",
        str(picture),
    ]
    result = CliRunner().invoke(conductor, [*options, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = read(file)
    assert {curve.name for curve in report.curves} == {"10,000 blocks, p50", "10,000 blocks, p99"}
    assert all(len(curve.points) == 2 for curve in report.curves)
    assert "a lookup" in {row.metric for row in report.rows}
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_a_real_conductor_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["--part", "http", "--part", "booking", "--requests", "64", "--json", str(file)]
    result = CliRunner().invoke(conductor, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "added latency" in file.read_text()
    found = {row.metric: row.value for row in read(file).rows}
    assert (
        0 < found["placement and booking, the one that decides"] < found["placement and booking, the other"]
    )


@pytest.mark.slow
def test_workers_and_growth_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    parts = ["--part", "workers", "--part", "growth", "--quick", "--rounds", "1"]
    arguments = [*parts, "--decisions", "20", "--json", str(file)]
    result = CliRunner().invoke(conductor, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = {(row.case, row.metric): row.value for row in read(file).rows}
    assert 0 < rows["SSE, 2 workers beside 1", "tokens of each"] < 1.5
    assert 0.4 < rows["SSE, 2 workers beside 1", "the busiest worker's part of the CPU"] <= 1
    assert rows["SSE: streams", "CPU a token at 256 over 1"] > 0
    assert rows["memory after 200 and 1,000 requests", "growth"] > 0.5
