"""The benchmark of the kernels measures something, in the one shape of all benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import report
from bench.cli import bench
from bench.kernels.clock import seconds_of


@pytest.mark.parametrize("part", ["step", "decode"])
def test_bench_kernels(tmp_path: Path, part: str) -> None:
    path = tmp_path / "report.json"
    arguments = ["kernels", "--quick", "--part", part, "--rounds", "1", "--json", str(path)]
    done = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    report.validate(content)
    assert content["rows"]
    assert all(row["value"] > 0 for row in content["rows"])


def test_contestants_are_timed_in_turn() -> None:
    order: list[str] = []
    found = seconds_of({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, wanted_s=0)
    assert set(found) == {"a", "b"}
    # Two calls to see how long each takes, then one a round.
    assert "".join(order) == "aabb" + "ab" * 3
