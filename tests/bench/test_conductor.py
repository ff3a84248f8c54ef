"""The conductor's benchmark measures what it says: a made-up cluster that behaves, and a real conductor."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from moonpool.bench.conductor.command import conductor
from moonpool.bench.conductor.decisions import scale_rows
from moonpool.bench.conductor.plot import draw
from moonpool.bench.conductor.population import BLOCK_SIZE, CHAIN_BLOCKS, Population
from moonpool.runtime.reports.report import Environment, Report, validate


def test_decisions_fall_on_nodes_of_both_roles_and_use_what_is_held() -> None:
    population = Population(32, 10_000, "goodput")
    assert population.num_blocks == 10_000 // CHAIN_BLOCKS * CHAIN_BLOCKS
    placements = [population.decide(population.question(), 1e-3 * i) for i in range(200)]
    assert {placement.prefill.node_id[0] for placement in placements} == {"p"}
    assert {placement.decode.node_id[0] for placement in placements if placement.decode} == {"d"}
    assert any(placement.prefill.prefix_tokens for placement in placements)
    assert all(p.prefill.prefix_tokens <= CHAIN_BLOCKS * BLOCK_SIZE for p in placements)


def test_the_same_seed_decides_alike() -> None:
    def decisions() -> list[str]:
        population = Population(100, 10_000, "goodput", seed=3)
        return [population.decide(population.question(), 1e-3 * i).prefill.node_id for i in range(50)]

    assert decisions() == decisions()


def test_costs_are_drawn(tmp_path: Path) -> None:
    rows = scale_rows(((8, 1000), (32, 1000)), "goodput", 20, lambda _: None)
    report = Report(Environment("", {}, "", "2026-11-21T00:00:00+00:00"), rows)
    validate(report.as_json())
    draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_real_conductor_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["--part", "http", "--requests", "64", "--json", str(file)]
    result = CliRunner().invoke(conductor, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "added latency" in file.read_text()
