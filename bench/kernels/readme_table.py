"""The README's table of kernels, made from ``bench/results``: ``python -m
moonpool.bench.kernels.readme_table``.

``--check`` writes nothing, and fails where the README says anything else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from moonpool.bench.kernels.command import LIMITS_CASE
from moonpool.runtime.reports.report import number

ROOT = Path(__file__).parents[3]
README, RESULTS = ROOT / "README.md", ROOT / "bench" / "results"
BEGIN, END = "<!-- kernels: made by python -m moonpool.bench.kernels.readme_table -->", "<!-- /kernels -->"
NO_GPU = """No result of a GPU is committed yet: none of the Triton kernels has been timed. `make gpu` on a
machine with one measures them against the goals in `bench/kernels/goals.py`.
"""


def reports(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file name, content) of every report of the kernels with figures that have a goal."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        rows = content.get("rows", []) if isinstance(content, dict) else []
        has_goals = any("limit" in row and row["metric"] != "error" for row in rows)
        if has_goals and any(row["case"] == LIMITS_CASE for row in rows):
            found.append((path.name, content))
    return found


def on_gpu(content: dict[str, Any]) -> bool:
    return "CUDA" in content["environment"]["machine"]


def table(name: str, content: dict[str, Any]) -> str:
    """Every figure that has a goal, but for errors, of which the largest is said below."""
    environment = content["environment"]
    lines = [
        f"{environment['machine']}, torch {environment['versions']['torch']}, commit {environment['commit']} "
        f"(`bench/results/{name}`):",
        "",
        "| what | reached | against | ratio | goal |",
        "|---|---|---|---|---|",
    ]
    errors = []
    for row in content["rows"]:
        if "limit" not in row:
            continue
        measured = row.get("ratio", row["value"])
        reached = (
            measured >= row["limit_value"] if row["limit"] == "at least" else measured <= row["limit_value"]
        )
        if row["metric"] == "error":
            errors.append(reached)
            continue
        sign, missed = "≥" if row["limit"] == "at least" else "≤", "" if reached else ", **missed**"
        against = f"{row['peer']} {number(row['peer_value'])}" if "peer" in row else "–"
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else "–"
        lines.append(
            f"| {row['case']} | {number(row['value'])} {row['unit']} | {against} | {ratio} "
            f"| {sign} {row['limit_value']}{missed} |"
        )
    lines.append("")
    lines.append(f"Errors against the reference within their bounds: {sum(errors)} of {len(errors)}.")
    return "\n".join(lines) + "\n"


def section(folder: Path) -> str:
    found = reports(folder)
    parts = [table(name, content) for name, content in found]
    if not any(on_gpu(content) for _, content in found):
        parts.insert(0, NO_GPU)
    return "\n".join(parts)


def filled(readme: str, folder: Path) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{section(folder)}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    there = README.read_text()
    wanted = filled(there, RESULTS)
    if arguments.check:
        if there != wanted:
            print("README.md: run python -m moonpool.bench.kernels.readme_table", file=sys.stderr)
        return int(there != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
