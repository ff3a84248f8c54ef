"""Whether a candidate may take the place of the model before it: a pure decision from counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from moonpool.conductor.observing.slo import Slo

ERRORS_MARGIN: Final = 0.01
"""A candidate may fail this fraction of requests more."""
SLO_MARGIN: Final = 0.05
"""A candidate may miss an SLO in this fraction of requests more."""
LEAST_REQUESTS: Final = 100
_ALPHA = 0.05
# Differences of about this size are found with the fewest requests; any choice is valid.
_SPREAD = 0.1


@dataclass(slots=True)
class Tally:
    """What came of the requests of one side. Only differences between the sides have a meaning."""

    requests: int = 0  # that ended, by an answer or by an error that was not the client's
    errors: int = 0  # of those
    ttft_within: int = 0  # of those without an error: the first token kept the SLO
    decoded: int = 0  # of those without an error: more than one token
    tbt_within: int = 0  # of those decoded: the mean of the tokens after the first kept the SLO
    ttft_s: float = 0.0  # sum over those without an error
    tbt_s: float = 0.0  # sum of the means over those decoded

    def add(self, other: Tally) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class Verdict(StrEnum):
    """What the counts say."""

    PROMOTE = "promote"
    WAIT = "wait"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True)
class Decision:
    """``reasons``: a sentence for each measure, and for what is missing."""

    verdict: Verdict
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Measure:
    """Requests that went well, of all that count, on either side."""

    what: str
    margin: float
    stable: tuple[int, int]
    candidate: tuple[int, int]


def decide(stable: Tally, candidate: Tally, slo: Slo, least: int = LEAST_REQUESTS) -> Decision:
    """Compare answers without errors, and where there is an SLO its attainment.

    Roll back as soon as one measure is worse by more than its margin for sure; promote when none can be, and
    the candidate has ended ``least`` requests. May be asked after every request: see ``difference``.
    """
    reasons, worse, unsure = [], False, False
    for one in _measures(stable, candidate, slo):
        low, high = difference(one.stable, one.candidate)
        is_worse, is_unsure = high < -one.margin, low < -one.margin <= high
        worse, unsure = worse or is_worse, unsure or is_unsure
        judged = "clearly worse" if is_worse else "not certain yet" if is_unsure else "good enough"
        reasons.append(
            f"{one.what}: {_share(*one.candidate)}, before {_share(*one.stable)}, a difference of "
            f"{100 * low:+.1f} to {100 * high:+.1f} points: {judged} (may lose {100 * one.margin:g})"
        )
    if candidate.requests < least:
        reasons.append(f"{candidate.requests} of at least {least} requests of the candidate have ended")
    if worse:
        return Decision(Verdict.ROLL_BACK, tuple(reasons))
    waits = unsure or candidate.requests < least
    return Decision(Verdict.WAIT if waits else Verdict.PROMOTE, tuple(reasons))


def _measures(stable: Tally, candidate: Tally, slo: Slo) -> Iterator[_Measure]:
    served, served_new = stable.requests - stable.errors, candidate.requests - candidate.errors
    yield _Measure(
        "answered without an error",
        ERRORS_MARGIN,
        (served, stable.requests),
        (served_new, candidate.requests),
    )
    if not math.isinf(slo.ttft_s):
        yield _Measure(
            "first token in time",
            SLO_MARGIN,
            (stable.ttft_within, served),
            (candidate.ttft_within, served_new),
        )
    if not math.isinf(slo.tbt_s) and (stable.decoded or candidate.decoded):
        yield _Measure(
            "next tokens in time",
            SLO_MARGIN,
            (stable.tbt_within, stable.decoded),
            (candidate.tbt_within, candidate.decoded),
        )


def difference(stable: tuple[int, int], candidate: tuple[int, int]) -> tuple[float, float]:
    """The bounds of the candidate's rate minus the other's; each is given as hits and trials.

    They hold, with 95 %, for all looks at growing counts together: a mixture sequential probability ratio
    test on two rates (Johari and others, Always Valid Inference, 2022). Fixed-size tests that are asked again
    and again find a difference sooner or later where there is none. Trials are taken as independent. One hit
    and one miss are added to each side (Agresti and Caffo, 2000), so that no rate is certain at once.
    """
    (rate, variance), (new_rate, new_variance) = _rate(*stable), _rate(*candidate)
    middle, variance, spread2 = new_rate - rate, variance + new_variance, _SPREAD**2
    whole = variance + spread2
    half = math.sqrt(variance * whole / spread2 * (math.log(whole / variance) - 2 * math.log(_ALPHA)))
    return max(middle - half, -1.0), min(middle + half, 1.0)


def _rate(hits: int, trials: int) -> tuple[float, float]:
    """The rate and the variance of its error."""
    rate = (hits + 1) / (trials + 2)
    return rate, rate * (1 - rate) / (trials + 2)


def _share(hits: int, trials: int) -> str:
    return f"{hits / trials:.1%} of {trials}" if trials else "none"
