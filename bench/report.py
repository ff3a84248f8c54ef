"""The one shape in which every benchmark reports: as a table for people, as JSON for programs.

``moonpool bench X --json FILE`` writes::

    {
      "environment": {
        "machine":  "AMD EPYC, 2 cores, 23 GiB, Linux 6.1",
        "versions": {"python": "3.11.2", "torch": "2.13.0+cpu"},   # of what was measured
        "commit":   "57d2b2a",            # "+" behind it: with uncommitted changes; "" outside a checkout
        "date":     "2026-11-21T03:00:00+00:00"
      },
      "rows": [
        {
          "case":   "8 concurrent, 128 + 128 tokens",   # what was done
          "metric": "throughput",                       # what was measured; unique within its case (and peer)
          "value":  4012.5,                             # in "unit"; a median unless the case says otherwise
          "unit":   "tokens/s",
          "p50": 4012.5, "p99": 4100.0,                 # optional, of the same measurement
          "limit": "at least",                          # optional: "at least" or "at most", and
          "limit_value": 4000.0,                        #   its bound for "ratio" or, without one, "value"
          "ratio": 2.1,                                 # optional: value / peer_value, of the same run
          "peer": "transformers",                       # optional: who else did the same
          "peer_value": 1910.0
        }
      ]
    }

All numbers are finite floats. ``limit`` and ``limit_value`` come together, as do ``peer`` and ``peer_value``;
``ratio`` needs a peer.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.errors import MoonpoolError

LIMITS = ("at least", "at most")


class ReportInvalid(MoonpoolError):
    """A report does not have the shape above. ``where`` names the place, such as ``rows[3].ratio``."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} {what}")
        self.where = where
        self.what = what


@dataclass(frozen=True, slots=True)
class Environment:
    machine: str
    versions: Mapping[str, str]
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    metric: str
    value: float
    unit: str
    p50: float | None = None
    p99: float | None = None
    limit: str | None = None
    limit_value: float | None = None
    ratio: float | None = None
    peer: str | None = None
    peer_value: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the limit holds; None where there is none."""
        if self.limit is None or self.limit_value is None:
            return None
        measured = self.value if self.ratio is None else self.ratio
        return measured >= self.limit_value if self.limit == "at least" else measured <= self.limit_value


@dataclass(frozen=True, slots=True)
class Report:
    environment: Environment
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        """The shape above; what is None is left out."""
        environment = asdict(self.environment)
        environment["versions"] = dict(self.environment.versions)
        rows = [{k: v for k, v in asdict(row).items() if v is not None} for row in self.rows]
        return {"environment": environment, "rows": rows}


def versus(row: Row, peer: str, peer_value: float) -> Row:
    """``row`` with a peer's figure of the same measurement beside it, and their ratio."""
    values = {field.name: getattr(row, field.name) for field in fields(Row)}
    return Row(**{**values, "peer": peer, "peer_value": peer_value, "ratio": row.value / peer_value})


def measure_environment(packages: Iterable[str], now: Callable[[], datetime] | None = None) -> Environment:
    """This machine, now. ``packages``: the distributions whose versions matter; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    date = now() if now is not None else datetime.now(UTC)
    return Environment(_machine(), versions, _commit(), date.isoformat(timespec="seconds"))


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores, {gib:.0f} GiB, {platform.system()} {platform.release()}"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""  # installed from a wheel, or no git: the version stands for the commit


def write(report: Report, path: Path) -> None:
    """Check ``report`` and write it as JSON. Nothing is written when it is invalid."""
    content = report.as_json()
    validate(content)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def validate(content: Any) -> None:
    """Check that ``content``, as parsed from JSON, has the shape of this module's docstring.

    Raises:
        ReportInvalid: naming the first place that is wrong.
    """
    _keys("report", content, {"environment": dict, "rows": list}, {})
    environment = {"machine": str, "versions": dict, "commit": str, "date": str}
    _keys("environment", content["environment"], environment, {})
    for name, version in content["environment"]["versions"].items():
        _require(isinstance(version, str), f"environment.versions.{name}", "must be a text")
    try:
        datetime.fromisoformat(content["environment"]["date"])
    except ValueError as error:
        raise ReportInvalid("environment.date", f"must be an ISO 8601 date: {error}") from error
    seen: set[tuple[str, str, str | None]] = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        _validate_row(where, row)
        name = (row["case"], row["metric"], row.get("peer"))
        _require(name not in seen, where, f"repeats {name[1]!r} of {name[0]!r}")
        seen.add(name)


def _validate_row(where: str, row: Any) -> None:
    needed = {"case": str, "metric": str, "value": float, "unit": str}
    optional = {"p50": float, "p99": float, "limit": str, "limit_value": float}
    optional |= {"ratio": float, "peer": str, "peer_value": float}
    _keys(where, row, needed, optional)
    for one, other in (("limit", "limit_value"), ("peer", "peer_value")):
        _require((one in row) == (other in row), where, f"must have both {one} and {other}, or neither")
    _require("ratio" not in row or "peer" in row, f"{where}.ratio", "needs a peer")
    _require(row.get("limit", LIMITS[0]) in LIMITS, f"{where}.limit", f"must be one of {', '.join(LIMITS)}")


def _keys(where: str, content: Any, needed: Mapping[str, type], optional: Mapping[str, type]) -> None:
    _require(isinstance(content, dict), where, "must be an object")
    for key in needed:
        _require(key in content, f"{where}.{key}", "is missing")
    known = {**needed, **optional}
    for key, value in content.items():
        place = f"{where}.{key}"
        _require(key in known, place, f"is unknown; known are {', '.join(known)}")
        if known[key] is float:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(number and math.isfinite(value), place, f"must be a finite number, got {value!r}")
        else:
            _require(isinstance(value, known[key]), place, f"must be a {known[key].__name__}")


def _require(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise ReportInvalid(where, what)


def number(value: float | None) -> str:
    """A figure as a person reads it: four digits at most, nothing for None."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def show(report: Report, console: Console | None = None) -> None:
    """Print the rows case by case; columns without a figure are left out."""
    # Into a file or a pipe, the table is as wide as it needs.
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    columns: dict[str, Callable[[Row], str]] = {
        "": lambda row: "  " + row.metric,
        "value": lambda row: number(row.value),
        "unit": lambda row: row.unit,
        "p50": lambda row: number(row.p50) if row.p50 != row.value else "",
        "p99": lambda row: number(row.p99),
        "against": lambda row: f"{row.peer} {number(row.peer_value)}" if row.peer else "",
        "ratio": lambda row: number(row.ratio),
        "limit": _limit,
    }
    shown = {name: cell for name, cell in columns.items() if any(cell(row) for row in report.rows)}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in shown:
        table.add_column(name, justify="right" if name in ("value", "p50", "p99", "ratio") else "left")
    case = None
    for row in report.rows:
        if row.case != case:
            case = row.case
            table.add_row(f"[bold]{case}[/]")
        table.add_row(*(cell(row) for cell in shown.values()))
    console.print(table)
    console.print(f"{report.environment.machine}; commit {report.environment.commit}", style="dim")


def _limit(row: Row) -> str:
    if row.limit is None:
        return ""
    verdict = "[green]reached[/]" if row.reached else "[red]missed[/]"
    return f"{row.limit} {number(row.limit_value)} {verdict}"
