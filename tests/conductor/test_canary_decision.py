"""Promote, wait or roll back: what counts of a canary say."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from moonpool.conductor.canary.decision import Tally, Verdict, decide, difference
from moonpool.conductor.observing.slo import Slo

NONE = Slo()
BOTH = Slo(1.0, 0.1)


def tally(requests: int, *, errors: int = 0, late: int = 0, slow: int = 0) -> Tally:
    """``late``: first tokens that missed the SLO; ``slow``: answers whose next tokens did."""
    served = requests - errors
    return Tally(requests, errors, served - late, served, served - slow)


def test_nothing_is_decided_without_requests() -> None:
    for stable, candidate in ((Tally(), Tally()), (tally(5000), Tally()), (Tally(), tally(5000))):
        assert decide(stable, candidate, BOTH).verdict is Verdict.WAIT


def test_as_good_as_before_is_promoted_once_it_is_certain() -> None:
    assert decide(tally(9000), tally(200), BOTH).verdict is Verdict.WAIT
    good = decide(tally(9000, errors=9, late=90, slow=45), tally(1000, errors=1, late=10, slow=5), BOTH)
    assert good.verdict is Verdict.PROMOTE
    assert len(good.reasons) == 3
    assert good.reasons[0].startswith("answered without an error: 99.9% of 1000, before 99.9% of 9000")
    few = decide(tally(9000), tally(1000), BOTH, least=2000)
    assert few.verdict is Verdict.WAIT
    assert few.reasons[-1] == "1000 of at least 2000 requests of the candidate have ended"


def test_a_candidate_that_only_fails_is_rolled_back_after_a_few_requests() -> None:
    assert decide(tally(50), tally(2, errors=2), NONE).verdict is Verdict.WAIT
    broken = decide(tally(50), tally(6, errors=6), NONE)
    assert broken.verdict is Verdict.ROLL_BACK
    assert "0.0% of 6, before 100.0% of 50" in broken.reasons[0] and "clearly worse" in broken.reasons[0]


@pytest.mark.parametrize("worse", ["late", "slow"])
def test_a_candidate_that_misses_an_slo_is_rolled_back_however_few_errors_it_has(worse: str) -> None:
    bad = tally(600, **{worse: 180})
    assert decide(tally(5000, errors=500), bad, BOTH).verdict is Verdict.ROLL_BACK
    assert decide(tally(5000), bad, NONE).verdict is Verdict.PROMOTE, "there is no SLO to miss"


def test_a_little_worse_is_within_the_margin_and_a_little_more_waits() -> None:
    assert decide(tally(50_000, late=500), tally(5000, late=150), BOTH).verdict is Verdict.PROMOTE
    assert decide(tally(50_000, late=500), tally(5000, late=300), BOTH).verdict is Verdict.WAIT
    assert decide(tally(50_000, late=500), tally(5000, late=600), BOTH).verdict is Verdict.ROLL_BACK


def test_answers_of_one_token_have_no_next_ones_to_compare() -> None:
    stable, candidate = (Tally(n, 0, n, 0, 0) for n in (9000, 1000))
    assert decide(stable, candidate, BOTH).verdict is Verdict.PROMOTE


def test_a_candidate_that_is_better_is_promoted() -> None:
    assert decide(tally(900, errors=300), tally(120), NONE).verdict is Verdict.PROMOTE


def test_more_requests_narrow_the_bounds_around_the_true_difference() -> None:
    width = math.inf
    for n in (10, 100, 1000, 10_000):
        low, high = difference((9 * n, 10 * n), (8 * n, 10 * n))
        assert low < -0.1 < high
        assert high - low < width
        width = high - low
    assert width < 0.02


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
def test_the_bounds_hold_for_all_looks_together(rate: float) -> None:
    """Two equal sides, looked at after each request: a test made for one look would find a difference in a
    large part of the runs."""
    draws, runs, found = random.Random(7), 100, 0
    for _ in range(runs):
        hits, trials = [0, 0], [0, 0]
        for _ in range(1500):
            side = draws.random() < 0.3
            trials[side] += 1
            hits[side] += draws.random() >= rate
            low, high = difference((hits[0], trials[0]), (hits[1], trials[1]))
            if low > 0 or high < 0:
                found += 1
                break
    assert found <= 0.05 * runs + 3


def concluded(failing: tuple[float, float], late: tuple[float, float], seed: int) -> tuple[Verdict, int]:
    """One simulated canary with a share of 10 %, looked at after each request of the candidate. Probabilities
    of the old model and of the candidate. Returns the verdict and the candidate's requests."""
    draws, sides = random.Random(seed), (Tally(), Tally())
    for _ in range(40_000):
        new = draws.random() < 0.1
        side = sides[new]
        side.requests += 1
        if draws.random() < failing[new]:
            side.errors += 1
        else:
            side.decoded += 1
            side.ttft_within += draws.random() >= late[new]
            side.tbt_within += draws.random() >= late[new]
        if new and (verdict := decide(*sides, BOTH).verdict) is not Verdict.WAIT:
            return verdict, side.requests
    return Verdict.WAIT, sides[1].requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "late", "verdict", "requests"),
    [
        ((0.0, 1.0), (0.05, 0.05), Verdict.ROLL_BACK, 4),
        ((0.0, 0.2), (0.05, 0.05), Verdict.ROLL_BACK, 46),
        ((0.0, 0.05), (0.05, 0.05), Verdict.ROLL_BACK, 275),
        ((0.0, 0.0), (0.05, 0.4), Verdict.ROLL_BACK, 22),
        ((0.0, 0.0), (0.05, 0.15), Verdict.ROLL_BACK, 286),
        ((0.0, 0.0), (0.02, 0.02), Verdict.PROMOTE, 459),
        ((0.01, 0.01), (0.05, 0.05), Verdict.PROMOTE, 1269),
    ],
)
def test_the_requests_that_a_verdict_takes(
    failing: tuple[float, float], late: tuple[float, float], verdict: Verdict, requests: int
) -> None:
    """The table in docs/models.md, with fewer runs."""
    runs = [concluded(failing, late, seed) for seed in range(15)]
    assert {one for one, _ in runs} == {verdict}
    assert requests / 2 <= statistics.median(count for _, count in runs) <= requests * 2
