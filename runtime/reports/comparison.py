"""Two states of the code or the options: which figures changed by more than their noise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log2

import numpy as np
from rich.console import Console
from rich.table import Table

from moonpool.runtime.reports.report import Report, Row, number

_RESAMPLES = 4000
_SEED = 0


class Verdict(StrEnum):
    """REAL: beyond what differs between runs. DIFFERS: beyond what differs within the one pair of runs there
    is, so the code or the state of the machine changed."""

    REAL = "real"
    DIFFERS = "differs"
    NOISE = "noise"
    TOO_FEW = "too few samples"
    NO_SAMPLES = "no samples"


# Units of which less is better; those that end in "/s" are rates. Of others it is not known.
_COSTS = ("s", "ms", "µs", "ns", "s/GB", "µs/block", "s a request", "node-ms")
_BEYOND = (Verdict.REAL, Verdict.DIFFERS)


@dataclass(frozen=True, slots=True)
class Change:
    """A figure before and after. ``low`` and ``high`` bound ``after / before``; None without an interval.

    num_samples: pairs of rounds or runs; of unequal numbers of rounds, the smaller one.
    """

    case: str
    metric: str
    unit: str
    before: float
    after: float
    num_samples: int
    verdict: Verdict
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        """``after / before``; None of 0."""
        return self.after / self.before if self.before else None

    def is_worse(self, percent: float) -> bool:
        """A real change for the worse by more than ``percent`` of the figure before, with its whole interval.
        A rate that is halved is worse by 50, a time that doubles by 100."""
        if self.verdict is not Verdict.REAL or self.low is None or self.high is None:
            return False
        if self.unit in _COSTS:
            return self.low > 1 + percent / 100
        return self.unit.endswith("/s") and self.high < 1 - percent / 100


def compare_runs(before: Sequence[Report], after: Sequence[Report], confidence: float = 0.95) -> list[Change]:
    """Compare ``before[i]`` with ``after[i]``: the rows that all have, in the order of the first.

    One pair is compared by the samples of its rows, several pairs by the values of their rows.
    """
    assert before and len(before) == len(after)
    found = [_rows(report) for report in (*before, *after)]
    changes = []
    for name, row in found[0].items():
        rows = [each[name] for each in found if name in each]
        if len(rows) < len(found) or any(each.unit != row.unit for each in rows):
            continue
        changes.append(_change(rows[: len(before)], rows[len(before) :], confidence))
    return changes


def _rows(report: Report) -> dict[tuple[str, str], Row]:
    """By case and metric. A row repeated beside several peers counts once."""
    found: dict[tuple[str, str], Row] = {}
    for row in report.rows:
        found.setdefault((row.case, row.metric), row)
    return found


def _change(before: Sequence[Row], after: Sequence[Row], confidence: float) -> Change:
    first = before[0]
    if len(before) > 1:
        old, new = ([row.value for row in rows] for rows in (before, after))
    else:
        old, new = (list(rows[0].samples or ()) for rows in (before, after))
    middle = [float(np.median([row.value for row in rows])) for rows in (before, after)]
    num_samples = min(len(old), len(new))
    verdict, bounds = Verdict.NO_SAMPLES, None
    # A ratio needs figures above 0.
    if num_samples and min(*old, *new) > 0:
        verdict = Verdict.TOO_FEW
        if num_samples >= least_samples(confidence):
            bounds = interval(old, new, confidence)
            beyond = Verdict.REAL if len(before) > 1 else Verdict.DIFFERS
            verdict = Verdict.NOISE if bounds[0] <= 1 <= bounds[1] else beyond
    low, high = bounds or (None, None)
    return Change(first.case, first.metric, first.unit, middle[0], middle[1], num_samples, verdict, low, high)


def least_samples(confidence: float) -> int:
    """The fewest pairs that can tell a change: so many agree in direction by chance too seldom."""
    return 1 + ceil(-log2(1 - confidence))


def interval(before: Sequence[float], after: Sequence[float], confidence: float) -> tuple[float, float]:
    """Bounds of ``after / before`` by bootstrap (percentiles), of figures above 0.

    Of equal numbers, the figures at the same position are pairs, and the median of their ratios is estimated.
    Otherwise it is the ratio of the medians. Medians keep their confidence with few pairs; an interval of the
    mean is too narrow. The same figures always give the same bounds.
    """
    rng = np.random.default_rng(_SEED)
    old, new = np.asarray(before), np.asarray(after)
    if len(old) == len(new):
        ratios = _medians(new / old, rng)
    else:
        ratios = _medians(new, rng) / _medians(old, rng)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return float(low), float(high)


def _medians(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[_RESAMPLES]: medians of ``values``, [n], drawn with replacement."""
    drawn = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    return np.asarray(np.median(values[drawn], axis=1))


def differences(reports: Sequence[Report]) -> list[str]:
    """What else than the commit differs between the runs: a sentence for each condition."""
    found: dict[str, dict[str, None]] = {}
    for at, report in enumerate(reports):
        environment = report.environment
        conditions = {"machine": environment.machine, **environment.versions, **(environment.options or {})}
        if environment.conditions is not None:
            conditions |= environment.conditions.facts()
        for name in conditions.keys() | found.keys():
            values = found.setdefault(name, {"(not recorded)": None} if at else {})
            values[conditions.get(name, "(not recorded)")] = None
    return [
        f"{name} differs: {' / '.join(values)}" for name, values in sorted(found.items()) if len(values) > 1
    ]


def show_changes(changes: Sequence[Change], notes: Sequence[str], confidence: float) -> None:
    """Print the conditions that differ, then the changes case by case."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for note in notes:
        console.print(note, style="yellow", markup=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "before", "after", "unit", "change", "interval", "samples", "verdict"):
        table.add_column(
            name, justify="right" if name in ("before", "after", "change", "samples") else "left"
        )
    case = None
    for change in changes:
        if change.case != case:
            case = change.case
            table.add_row(f"[bold]{case}[/]")
        bounds = "" if change.low is None else f"{_percent(change.low)} to {_percent(change.high)}"
        verdict = f"[bold]{change.verdict}[/]" if change.verdict in _BEYOND else change.verdict
        figures = (number(change.before), number(change.after), change.unit, _percent(change.ratio), bounds)
        table.add_row("  " + change.metric, *figures, str(change.num_samples), verdict)
    console.print(table)
    told = sum(change.low is not None for change in changes)
    beyond = sum(change.verdict in _BEYOND for change in changes)
    chance = number((1 - confidence) * told)
    console.print(f"{beyond} of {told} are beyond noise; chance alone gives about {chance}.", style="dim")
    if any(change.verdict is Verdict.DIFFERS for change in changes):
        text = "One pair of runs cannot tell a change from a busier machine; measure several pairs in turn."
        console.print(text, style="yellow")
    if any(change.verdict is Verdict.TOO_FEW for change in changes):
        fewest = least_samples(confidence)
        console.print(f"Fewer than {fewest} rounds (one pair) or pairs tell nothing.", style="dim")


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
