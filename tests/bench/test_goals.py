"""The table of goals: committed results have the limits that it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.bench.harness.goals import with_goals
from moonpool.runtime.reports.report import read

RESULTS = Path(__file__).parents[2] / "bench" / "results"
BENCHES = ("conductor", "index", "kernels", "mixture", "parallel", "store", "transfer")
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
