"""The one shape in which every benchmark reports: as a table for people, as JSON for programs.

``moonpool bench X --json FILE`` writes::

    {
      "environment": {
        "machine":  "AMD EPYC, 2 cores, 23 GiB, Linux 6.1",
        "versions": {"python": "3.11.2", "torch": "2.13.0+cpu"},   # of what was measured
        "commit":   "57d2b2a",            # "+" behind it: with uncommitted changes; "" outside a checkout
        "date":     "2026-11-21T03:00:00+00:00",
        "command":  "moonpool bench serve --json FILE",  # this and what follows: older files lack it
        "options":  {"rounds": "7", "seed": "3"},        # every option, with the defaults
        "conditions": {
          "models": [                                    # none: no model was computed
            {"name": "small", "revision": "9f0c…",       # a digest of config.json and all weights
             "weights": "float32", "kv": "float32"}      # dtypes in use
          ],
          "cache": {"state": "cold",                     # when measuring began: cold, warm; none: no cache
                    "tokens": 0, "blocks": 0,            # in all tiers, with copies
                    "note": "each round has new prompts"},
          "warm_up": "a round that does not count",      # what ran before measuring
          "seeds": {"prompts": 3},
          "noise": {"rounds": 7,                         # repetitions, in turn with what is compared
                    "load": [0.3, 1.6],                  # one-minute load average at the start and the end
                    "spread": 0.02}                      # optional: the median of the rows' noise
        },
        "nodes": [                                       # optional: of a running cluster (GET /v1/report)
          {"name": "decode-0", "role": "decode", "machine": "AMD EPYC, 2 cores",
           "versions": {"torch": "2.13.0"}}
        ]
      },
      "rows": [
        {
          "case":   "8 concurrent, 128 + 128 tokens",   # what was done
          "metric": "throughput",                       # what was measured; unique within its case (and peer)
          "value":  4012.5,                             # in "unit"; a median unless the case says otherwise
          "unit":   "tokens/s",
          "p50": 4012.5, "p90": 4080.0, "p95": 4090.0, "p99": 4100.0,  # optional, of the same measurement
          "samples": [3990.0, 4012.5, 4100.0],          # optional: in the order of the rounds, in "unit"
          "noise": 0.014,                               # optional: the samples' middle half over their median
          "limit": "at least",                          # optional: "at least" or "at most", and
          "limit_value": 4000.0,                        #   its bound for "ratio" or, without one, "value"
          "ratio": 2.1,                                 # optional: value / peer_value, of the same run
          "peer": "transformers",                       # optional: who else did the same
          "peer_value": 1910.0,
          "peer_kind": "peer"                           # "limit": what this machine allows; "peer": another
                                                        #   system; "baseline": this one in another form
        }
      ],
      "curves": [                         # optional: lines of a picture
        {"panel": "cost", "name": "p50", "x": "nodes", "y": "µs", "points": [[16.0, 41.0], [64.0, 44.0]]}
      ]
    }

All numbers are finite floats. ``limit`` and ``limit_value`` come together, as do ``peer`` and ``peer_value``;
``ratio`` needs a peer. ``moonpool.runtime.reports.schema`` checks it: of files that are read, that what is
there has this form; of those that are written, that nothing is missing.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moonpool.runtime.machine.description import commit_here, describe_machine, versions_of
from moonpool.runtime.machine.gpus import gpu_names
from moonpool.runtime.redaction import redacted
from moonpool.runtime.reports.conditions import BASELINE, Conditions, noise_of
from moonpool.runtime.reports.schema import ReportInvalid, validate

# A list of numbers, or of such lists.
_NUMBERS = re.compile(r'\[(?:[^\[\]{}"]|\[[^\[\]{}"]*\])+\]')


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node of a running cluster."""

    name: str
    role: str
    machine: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Environment:
    machine: str
    versions: Mapping[str, str]
    commit: str
    date: str
    command: str = ""
    options: Mapping[str, str] | None = None
    conditions: Conditions | None = None  # None: in older files
    nodes: Sequence[NodeFacts] = ()

    def as_json(self, noises: Sequence[float] = ()) -> dict[str, Any]:
        """``noises``: those of the rows."""
        content: dict[str, Any] = {
            "machine": self.machine,
            "versions": dict(self.versions),
            "commit": self.commit,
            "date": self.date,
        }
        if self.command:
            content["command"] = self.command
        if self.options is not None:
            content["options"] = dict(self.options)
        if self.conditions is not None:
            content["conditions"] = self.conditions.as_json(noises)
        if self.nodes:
            content["nodes"] = [asdict(node) for node in self.nodes]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Environment:
        found = dict(content)
        if "conditions" in found:
            found["conditions"] = Conditions.from_json(found["conditions"])
        found["nodes"] = tuple(NodeFacts(**node) for node in found.get("nodes", ()))
        return cls(**found)


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
    p95: float | None = None
    p90: float | None = None
    samples: Sequence[float] | None = None
    noise: float | None = None  # written: that of the samples
    peer_kind: str | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the limit holds; None where there is none."""
        if self.limit is None or self.limit_value is None:
            return None
        measured = self.value if self.ratio is None else self.ratio
        return measured >= self.limit_value if self.limit == "at least" else measured <= self.limit_value


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a picture: ``points`` of (x, y). ``x`` and ``y`` label the axes of its panel."""

    panel: str
    name: str
    x: str
    y: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Report:
    environment: Environment
    rows: Sequence[Row]
    curves: Sequence[Curve] = ()

    def as_json(self) -> dict[str, Any]:
        """The shape above; what is None is left out."""
        noises = [row.noise if row.samples is None else noise_of(row.samples) for row in self.rows]
        rows = [
            {k: v for k, v in {**asdict(row), "noise": noise}.items() if v is not None}
            for row, noise in zip(self.rows, noises, strict=True)
        ]
        content: dict[str, Any] = {
            "environment": self.environment.as_json([noise for noise in noises if noise is not None]),
            "rows": rows,
        }
        if self.curves:
            content["curves"] = [
                {**asdict(curve), "points": [[float(x), float(y)] for x, y in curve.points]}
                for curve in self.curves
            ]
        return content


def versus(row: Row, peer: str, peer_value: float, kind: str | None = None) -> Row:
    """``row`` with a peer's figure of the same measurement beside it, and their ratio, unless that is 0.

    kind: see ``conditions.KINDS``; None: benchmarks' commands know it by the name.
    """
    ratio = row.value / peer_value if peer_value else None
    return replace(row, peer=peer, peer_value=peer_value, ratio=ratio, peer_kind=kind)


def measure_environment(
    packages: Iterable[str],
    now: Callable[[], datetime] | None = None,
    command: str = "",
    options: Mapping[str, object] | None = None,
    conditions: Conditions | None = None,
) -> Environment:
    """Describe this machine with its GPUs, and this process.

    packages: record the versions of these distributions; absent ones are left out. command: the command line,
    as a user types it; without it the one of this process. options: name to value; secrets are hidden.
    """
    date = now() if now is not None else datetime.now(UTC)
    gpus = [name if number == 1 else f"{number} × {name}" for name, number in Counter(gpu_names()).items()]
    return Environment(
        ", ".join([*gpus, describe_machine()]),
        versions_of(packages),
        commit_here(),
        date.isoformat(timespec="seconds"),
        redacted(command or _command_line()),
        None if options is None else {name: _option(name, value) for name, value in options.items()},
        conditions,
    )


def _option(name: str, value: object) -> str:
    """An option's value as text; several values have spaces between them."""
    values = value if isinstance(value, tuple | list) else (value,)
    text = " ".join(str(each) for each in values)
    # With its name before it, a value is known as a secret's.
    return redacted(f"{name}={text}").removeprefix(f"{name}=")


def _command_line() -> str:
    """This process's command, as a user would type it."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":  # python -m PACKAGE
        return shlex.join(["python", *sys.orig_argv[1:]])
    return shlex.join([program, *sys.argv[1:]])


def write(report: Report, path: Path) -> None:
    """Check ``report`` and write it as JSON. Nothing is written when it is invalid, or lacks a field."""
    content = report.as_json()
    validate(content, complete=True)
    text = json.dumps(content, indent=1, allow_nan=False)
    # Lists of numbers, and of points, are a line each.
    path.write_text(_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")


def read(path: Path) -> Report:
    """The report in a file. Raises ``ReportInvalid``."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ReportInvalid(str(path), f"must be JSON: {error}") from error
    validate(content)
    return Report(
        Environment.from_json(content["environment"]),
        [Row(**row) for row in content["rows"]],
        [Curve(**curve) for curve in content.get("curves", ())],
    )


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
        "p90": lambda row: number(row.p90),
        "p95": lambda row: number(row.p95),
        "p99": lambda row: number(row.p99),
        "against": _against,
        "ratio": lambda row: number(row.ratio),
        "limit": _limit,
    }
    shown = {name: cell for name, cell in columns.items() if any(cell(row) for row in report.rows)}
    table = Table(box=None, pad_edge=False, header_style="dim")
    figures = ("value", "p50", "p90", "p95", "p99", "ratio")
    for name in shown:
        table.add_column(name, justify="right" if name in figures else "left")
    case = None
    for row in report.rows:
        if row.case != case:
            case = row.case
            table.add_row(f"[bold]{case}[/]")
        table.add_row(*(cell(row) for cell in shown.values()))
    console.print(table)
    console.print(f"{report.environment.machine}; commit {report.environment.commit}", style="dim")
    if (conditions := report.environment.conditions) is not None:
        for name, text in conditions.facts().items():
            console.print(f"{name}: {text or 'none'}", style="dim", markup=False)


def _against(row: Row) -> str:
    if not row.peer:
        return ""
    kind = f"{row.peer_kind} " if row.peer_kind not in (None, BASELINE) else ""
    return f"{kind}{row.peer} {number(row.peer_value)}"


def _limit(row: Row) -> str:
    if row.limit is None:
        return ""
    verdict = "[green]reached[/]" if row.reached else "[red]missed[/]"
    return f"{row.limit} {number(row.limit_value)} {verdict}"
