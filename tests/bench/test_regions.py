"""``moonpool bench regions`` compares the same day under several routings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.regions.cells import AFFINITY, ALONE, DRAINED, RESERVE, CellSettings, CellsInTime
from moonpool.bench.regions.days import COST, ISOLATED, NEAREST, ROUTINGS, SUN, Days
from moonpool.runtime.reports import report
from moonpool.simulator.inputs.workload import Workload

DAYS = Days(("eu", "us", "ap"), day_s=1800.0, rate=0.5)


@pytest.mark.parametrize("option", ["--rate=0", "--day=0"])
def test_days_without_sessions_are_refused(option: str) -> None:
    result = CliRunner().invoke(bench, ["regions", "--nodes", "1", option])
    assert (result.exit_code, option.partition("=")[0] in result.output) == (2, True), result.output


def test_days_are_shifted_and_routings_get_the_same_requests() -> None:
    found = {routing: DAYS.requests(routing, Workload()) for routing in ROUTINGS}
    plain = [[replace(one, regions=frozenset()) for one in requests] for requests in found.values()]
    assert plain[0] == plain[1] == plain[2] == plain[3]
    assert all(one.regions == {one.origin} for one in found[ISOLATED])
    assert not any(one.regions for routing in (NEAREST, COST) for one in found[routing])
    for number, region in enumerate(DAYS.regions):
        thirds = Counter(int(one.arrival_s // 600) for one in found[COST] if one.origin == region)
        busiest = max(thirds, key=lambda third: thirds[third])
        assert busiest == number, "each has its own third of the day"
    away = Counter(next(iter(one.regions)) for one in found[SUN] if one.regions != {one.origin})
    assert len(away) == 3 and 0 < away.total() < 0.5 * len(found[SUN])
    eu, us = (
        {each for one in found[COST] if one.origin == region for each in one.block_ids}
        for region in ("eu", "us")
    )
    assert not eu & us, "regions have no prefix in common"


def test_a_report_compares_all_routings(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(bench, ["regions", "--quick", "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    rows = {(row["case"], row["metric"]): row["value"] for row in content["rows"]}
    for routing in ROUTINGS:
        assert 0 < rows[f"{routing}, 1 nodes a region", "requests within the SLOs"] <= 1
    assert rows["isolated, 1 nodes a region", "of that, bytes between regions"] == 0


def test_cells_find_more_prefixes_than_chance_and_fewer_than_one_index(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    parts = ["--part", "cells", "--part", "decision"]
    result = CliRunner().invoke(
        bench, ["regions", *parts, "--quick", "--json", str(file)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    ratios = {
        row["case"].partition(": ")[2]: row["value"]
        for row in content["rows"]
        if row["metric"] == "prompt tokens from caches"
    }
    assert ratios["random"] < ratios["affinity"] <= ratios["one global index"]
    assert any(row["metric"] == "CPU to choose a cell" for row in content["rows"])


def test_conversations_of_a_lost_cell_find_what_was_copied() -> None:
    settings = CellSettings(
        num_cells=4,
        num_nodes=100,
        node_tokens=3_000_000,
        rate=2e4,
        sample=200,
        warm_s=12.0,
        measured_s=10.0,
        after_s=30.0,
    )
    found = []
    for copies in (ALONE, RESERVE, DRAINED):
        cells = CellsInTime(AFFINITY, settings, copies)
        cells.run()
        after = cells.windows[1:]
        found.append(sum(one.displaced_hit for one in after) / sum(one.displaced_asked for one in after))
    alone, copied, drained = found
    assert alone < copied < drained, "the prompts of applications, and then the latest conversations"


@pytest.mark.parametrize("nodes", ["", "0", "2,x"])
def test_numbers_of_nodes_that_cannot_be_read_are_refused(nodes: str) -> None:
    result = CliRunner().invoke(bench, ["regions", "--nodes", nodes])
    assert result.exit_code == 2 and "is not like 1,2,3" in result.output
