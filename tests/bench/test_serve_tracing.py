"""``bench serve --case tracing``: what it makes of its rounds, and once for real."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.serve.tracing_overhead import Turn, cost_when_off_s, rows
from moonpool.cli import cli
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports import report


def test_the_ratio_is_of_the_two_turns_of_a_round() -> None:
    off = [Turn(100.0, 0.01, 0.002), Turn(200.0, 0.01, 0.001), Turn(300.0, 0.01, 0.001)]
    on = [Turn(99.0, 0.01, 0.002), Turn(190.0, 0.01, 0.001), Turn(297.0, 0.02, 0.001)]
    found = {row.metric: row for row in rows("case", on, off)}
    assert found["output throughput"].peer_value == 200.0
    assert found["output throughput, on over off"].value == pytest.approx(0.99)
    assert found["output throughput, on over off"].reached
    assert found["output throughput, on over off, least round"].value == pytest.approx(0.95)
    assert found["TPOT, on over off"].value == 1.0


def test_a_span_that_nobody_asked_for_costs_next_to_nothing() -> None:
    assert cost_when_off_s() < 20e-6  # 0.2 µs on an idle machine


def test_the_case_starts_its_own_clusters() -> None:
    arguments = ["bench", "serve", "--case", "tracing", "--url", "http://127.0.0.1:9"]
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, ConfigError)


@pytest.mark.slow
async def test_two_clusters_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["bench", "serve", "--case", "tracing", "--rounds", "1", "--requests", "4"]
    arguments += ["--concurrency", "2", "--output-tokens", "4", "--json", str(file)]
    for role in ("prefill", "decode"):
        arguments += ["--set", f"cluster.{role}=1"]
    result = await asyncio.to_thread(CliRunner().invoke, cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    found = {row["metric"]: row["value"] for row in content["rows"]}
    assert 8 <= found["spans a request"] <= 40
    assert found["output throughput"] > 0
