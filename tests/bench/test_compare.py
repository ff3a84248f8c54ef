"""``moonpool bench compare``: real changes are found, noise is not taken for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.harness.turns import condensed, spread
from moonpool.runtime.reports import report
from moonpool.runtime.reports.comparison import Verdict, compare_runs, differences, least_samples
from moonpool.runtime.reports.conditions import CacheState, ModelFacts
from moonpool.runtime.reports.report import Report, Row
from tests.bench.records import ENVIRONMENT


def run_of(*rows: Row) -> Report:
    return Report(ENVIRONMENT, rows)


def verdict_of(before: Sequence[float], after: Sequence[float]) -> Verdict:
    runs = [run_of(spread("c", "TTFT", values, "ms")) for values in (before, after)]
    (change,) = compare_runs(runs[:1], runs[1:])
    return change.verdict


@pytest.mark.parametrize(("old", "new"), [(6, 6), (10, 10), (40, 40), (12, 20)])
def test_noise_is_seldom_taken_for_a_change(old: int, new: int) -> None:
    rng = np.random.default_rng(old)
    verdicts = [
        verdict_of(list(rng.lognormal(0, 0.2, old)), list(rng.lognormal(0, 0.2, new))) for _ in range(200)
    ]
    # 5 % are expected; more than 12 % of 200 would be a rare accident.
    assert verdicts.count(Verdict.DIFFERS) <= 24


def test_one_disturbed_round_is_no_change() -> None:
    # The other rounds fall as often as they rise. A mean would follow the one that took 50 times as long.
    before, after = [10.0] * 8, [9.8, 10.2, 9.9, 10.1, 9.8, 10.2, 10.1, 500.0]
    runs = [run_of(spread("c", "TTFT", values, "ms")) for values in (before, after)]
    (change,) = compare_runs(runs[:1], runs[1:])
    assert change.verdict is Verdict.NOISE
    assert change.high is not None
    assert change.high < 1.1


def test_a_change_beyond_the_noise_is_found() -> None:
    rng = np.random.default_rng(1)
    verdicts = [
        verdict_of(list(rng.lognormal(0, 0.05, 10)), list(1.2 * rng.lognormal(0, 0.05, 10)))
        for _ in range(100)
    ]
    assert verdicts.count(Verdict.DIFFERS) >= 95


def test_pairs_remove_what_rounds_have_in_common() -> None:
    # Rounds differ tenfold; the same round differs by 3 % before and after.
    rng = np.random.default_rng(2)
    rounds = rng.uniform(1, 10, 12)
    after = 1.03 * rounds * rng.lognormal(0, 0.005, 12)
    assert verdict_of(list(rounds), list(after)) is Verdict.DIFFERS
    # Without their order, or with one round less, they are two heaps of the same width.
    assert verdict_of(list(rounds), list(rng.permutation(after))) is Verdict.NOISE
    assert verdict_of(list(rounds), list(after[1:])) is Verdict.NOISE


def test_too_few_samples_tell_nothing() -> None:
    assert least_samples(0.95) == 6
    assert least_samples(0.99) == 8
    assert verdict_of([1.0] * 5, [2.0] * 5) is Verdict.TOO_FEW
    assert verdict_of([1.0] * 6, [2.0] * 6) is Verdict.DIFFERS
    assert verdict_of([0.0] * 6, [2.0] * 6) is Verdict.NO_SAMPLES
    older = run_of(Row("c", "m", 1.0, "ms"))
    assert compare_runs([older], [older])[0].verdict is Verdict.NO_SAMPLES


def test_runs_are_compared_as_pairs() -> None:
    before = [run_of(Row("c", "m", value, "ms")) for value in (10.0, 20.0, 30.0, 40.0, 50.0, 60.0)]
    after = [run_of(Row("c", "m", 1.1 * row.value, "ms")) for run in before for row in run.rows]
    (change,) = compare_runs(before, after)
    assert change.verdict is Verdict.REAL
    assert (change.low, change.high) == (pytest.approx(1.1), pytest.approx(1.1))


def test_many_samples_become_medians_of_neighbours() -> None:
    assert condensed([3.0, 1.0]) == [3.0, 1.0]
    assert condensed([float(i // 10) for i in range(640)]) == [float(i) for i in range(64)]
    assert len(condensed([1.0] * 65)) == 64


@pytest.mark.parametrize(
    ("unit", "ratio", "is_worse"),
    [
        ("ms", 1.2, True),
        ("ms", 0.8, False),
        ("ms", 1.05, False),
        ("GB/s", 0.8, True),
        ("GB/s", 1.2, False),
        ("ratio", 0.5, False),
    ],
)
def test_a_bound_fails_what_became_worse(tmp_path: Path, unit: str, ratio: float, is_worse: bool) -> None:
    rng, files = np.random.default_rng(2), []
    for number in range(12):
        value = float((ratio if number % 2 else 1.0) * rng.lognormal(0, 0.01))
        files.append(tmp_path / f"{number}.json")
        report.write(run_of(Row("c", "figure", value, unit)), files[-1])
    arguments = ["compare", *map(str, files), "--worse", "10"]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == is_worse, result.output
    assert ("worse by more than 10 %: figure of 'c'" in result.output) == is_worse
    assert "needs 6 pairs" in CliRunner().invoke(bench, ["compare", *arguments[1:3], "--worse", "10"]).output


def test_conditions_that_differ_are_told() -> None:
    with_seed = Report(replace(ENVIRONMENT, options={"seed": "3"}), ())
    other = Report(replace(ENVIRONMENT, machine="another", options={"seed": "4"}), ())
    assert differences([with_seed, with_seed]) == []
    assert differences([with_seed, other]) == ["machine differs: a machine / another", "seed differs: 3 / 4"]
    without = Report(replace(ENVIRONMENT, options=None), ())
    assert differences([without, with_seed]) == ["seed differs: (not recorded) / 3"]
    assert ENVIRONMENT.conditions is not None
    warm = replace(ENVIRONMENT.conditions, cache=CacheState.holding(10, 16))
    (found,) = differences([with_seed, Report(replace(ENVIRONMENT, conditions=warm), ())])
    assert found == "cache differs: warm, 48 tokens in 3 blocks / warm, 160 tokens in 10 blocks"


def test_models_are_told_by_the_beginning_of_their_digest_or_by_what_stands_for_it() -> None:
    assert ENVIRONMENT.conditions is not None
    told = [
        replace(ENVIRONMENT.conditions, models=[ModelFacts("small", revision, "a", "b")]).facts()["model"]
        for revision in ("9f0c" * 10, "random weights, seed 0", "random weights, seed 1")
    ]
    assert told == [
        "small 9f0c9f0c9f0c, weights a, KV b",
        "small random weights, seed 0, weights a, KV b",
        "small random weights, seed 1, weights a, KV b",
    ]


def test_command_prints_the_verdict(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        rows = run_of(spread("case", "TTFT", [factor * value for value in range(10, 20)], "ms"))
        report.write(rows, tmp_path / f"{name}.json")
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    shown = CliRunner().invoke(bench, ["compare", a, b])
    assert shown.exit_code == 0
    assert "+100.0 %" in shown.output
    assert "1 of 1 are beyond noise" in shown.output
    assert "cannot tell a change from a busier machine" in shown.output
    assert CliRunner().invoke(bench, ["compare", a, b, a]).exit_code == 2
