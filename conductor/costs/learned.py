"""The cost of an engine that does not measure itself: fitted to what its requests took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple
from weakref import WeakSet

import numpy as np

from moonpool.conductor.costs.correction import Correction, Usual
from moonpool.conductor.costs.model import USUAL_BATCH, USUAL_PROMPT, NodeCost, Profile

# Before anything was measured: a small model on a CPU. Afterwards its proportions are a weak guess.
PRIOR = Profile(2e-3, 2e-5, 2e-9, 1e-3, 2e-4, 2e-8)

# Measurements of each kind that the fit is to; and how many are enough to judge the engine by.
_KEPT = 64
_ENOUGH = 4
_LEAST_S = 1e-6
# An engine that takes less than this part of its profile has become faster: what it took before is forgotten.
_PAST = 0.5

_Row = tuple[tuple[float, float, float], float]


class _Terms:
    """The measurements of prefills, or of steps, with three coefficients that fit them."""

    __slots__ = ("_rows", "fitted")

    def __init__(self, prior: Sequence[float]) -> None:
        self.fitted = prior
        self._rows: deque[_Row] = deque(maxlen=_KEPT)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: _Row, prior: Sequence[float]) -> None:
        self._rows.append(row)
        self.fitted = _fit(self._rows, prior)

    def forget(self) -> None:
        """Begin anew; ``fitted`` stays until the next measurement."""
        self._rows.clear()


class LearnedCost(NodeCost):
    """Its profile follows the latest measurements, so its corrections are 1, but for an engine slower than
    usual: it is trusted more and more while it gets no requests. ``LearnedCosts`` makes it."""

    __slots__ = ("__weakref__", "_all", "prefills", "steps")

    def __init__(self, every: LearnedCosts) -> None:
        usual = Correction()  # never observed: it stays 1
        super().__init__(PRIOR, Correction(usual, every.usual_prefill), Correction(usual, every.usual_step))
        self._all = every
        self.prefills = _Terms(every.prefills.fitted)
        self.steps = _Terms(every.steps.fitted)
        self.refresh()

    @property
    def knows_prefills(self) -> bool:
        return len(self.prefills) >= _ENOUGH

    @property
    def knows_steps(self) -> bool:
        return len(self.steps) >= _ENOUGH

    def learn_prefill(self, uncached_tokens: int, cached_tokens: int, actual_s: float, now_s: float) -> None:
        """A prefill that shared its steps with no other one took ``actual_s``."""
        pairs = uncached_tokens * (cached_tokens + 0.5 * uncached_tokens)
        row = (1.0, uncached_tokens, pairs), max(actual_s, _LEAST_S)
        profile_s = self.profile.prefill_s(uncached_tokens, cached_tokens)
        if _is_past(self.prefill_correction, profile_s, actual_s):
            self.prefills.forget()
        self.prefills.add(row, self._all.prefills.fitted)
        self._all.prefills.add(row, astuple(PRIOR)[:3])
        self._all.refresh()
        self.prefill_correction.measured(self.profile.prefill_s(USUAL_PROMPT, 0), now_s)

    def learn_step(self, num_sequences: float, context_tokens: float, actual_s: float, now_s: float) -> None:
        """A step of such a batch took ``actual_s``."""
        row = (1.0, num_sequences, context_tokens), max(actual_s, _LEAST_S)
        profile_s = self.profile.step_s(num_sequences, context_tokens)
        if _is_past(self.decode_correction, profile_s, actual_s):
            self.steps.forget()
        self.steps.add(row, self._all.steps.fitted)
        self._all.steps.add(row, astuple(PRIOR)[3:6])
        self._all.refresh()
        self.decode_correction.measured(self.profile.step_s(*USUAL_BATCH), now_s)

    def refresh(self) -> None:
        """Take the profile of its own measurements; until they are enough, that of all engines'."""
        # A single one may have met a busy machine: it would keep away even requests whose prefix is there.
        prefill = self.prefills if self.knows_prefills else self._all.prefills
        step = self.steps if self.knows_steps else self._all.steps
        self.profile = Profile(*prefill.fitted, *step.fitted)


class LearnedCosts:
    """Of all engines of one conductor: a new engine is expected to be like those before it."""

    def __init__(self) -> None:
        self.prefills = _Terms(astuple(PRIOR)[:3])
        self.steps = _Terms(astuple(PRIOR)[3:6])
        self.usual_prefill, self.usual_step = Usual(), Usual()
        self._costs: WeakSet[LearnedCost] = WeakSet()

    def new(self) -> LearnedCost:
        cost = LearnedCost(self)
        self._costs.add(cost)
        return cost

    def refresh(self) -> None:
        for cost in self._costs:
            cost.refresh()


def _is_past(correction: Correction, profile_s: float, actual_s: float) -> bool:
    """Whether an engine that was slow is slow no more: it was tried again on trust, and took far less than
    ``profile_s``."""
    return correction.tried < 1 and actual_s < _PAST * profile_s


def _fit(measured: Sequence[_Row], prior: Sequence[float]) -> list[float]:
    """Coefficients, none negative, of least squared relative errors; where the measurements do not tell them
    apart, in the proportions of ``prior``."""
    rows = np.array([row for row, _ in measured])
    seconds = np.array([actual_s for _, actual_s in measured])
    guess = np.array(prior)
    guess = guess * np.median(seconds / (rows @ guess))
    relative = rows * guess / seconds[:, None]
    weights = relative.T @ relative + np.eye(len(guess))
    found = np.linalg.solve(weights, relative.sum(axis=0) + 1.0)
    found = np.maximum(found, 0.0)
    # Terms that were set to 0 leave the others too large: half of the measurements shall be above the fit.
    found *= np.median(1.0 / (relative @ found))
    return [float(value) for value in found * guess]
