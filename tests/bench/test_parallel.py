"""``moonpool bench parallel`` measures what it says, and writes it down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.parallel import replicas, steps
from bench.parallel.command import parallel


def test_a_plan_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(parallel, ["--plan", "two"])
    assert result.exit_code == 2
    assert "two is not TP,PP" in result.output


def test_steps_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "NUM_STEPS", 20)
    monkeypatch.setattr(steps, "PROMPT", 300)
    json_path, plot_path = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["--plan", "2,1", "--rounds", "1", "--part", "steps"]
    result = CliRunner().invoke(parallel, [*arguments, "--json", str(json_path), "--plot", str(plot_path)])
    assert result.exit_code == 0, result.output
    rows = {(row["case"], row["metric"]): row["value"] for row in json.loads(json_path.read_text())["rows"]}
    case = f"tp 2 × pp 1, decode, batch {steps.BATCH}, context {steps.CONTEXT}"
    # The embedding, two a layer, and the logits.
    assert rows[case, "exchanges"] == 1 + 2 * 6 + 1
    assert 0 < rows[case, "computing, busiest rank"] < 1
    assert plot_path.stat().st_size > 0


def test_two_replicas_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_JOBS", (("decode", 10),))
    json_path = tmp_path / "report.json"
    result = CliRunner().invoke(parallel, ["--rounds", "1", "--part", "replicas", "--json", str(json_path)])
    assert result.exit_code == 0, result.output
    (row, efficiency) = json.loads(json_path.read_text())["rows"]
    assert row["case"] == f"dp 2, decode, batch {steps.BATCH} each, context {steps.CONTEXT}"
    assert row["peer"] == "one replica"
    assert efficiency["value"] == pytest.approx(row["ratio"] / 2)
