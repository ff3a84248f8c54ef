"""The cost model: seconds of prefills, decode steps and transfers, measured by nodes and corrected online.

Placement, fetch-or-recompute and ``Retry-After`` use these estimates; their errors are recorded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

from moonpool.conductor.costs.correction import Correction, Usual
from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.output_lengths import OutputLengths
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.runtime.cost_profile import CostProfile

# Tiers that were not measured: memory copies and O_DIRECT reads as measured elsewhere.
_UNKNOWN_HOST_NBYTES_PER_S = 5e9
_UNKNOWN_SSD_NBYTES_PER_S = 1.5e9

# The work by which profiles are compared: tokens of a prompt; sequences of a batch with their tokens.
USUAL_PROMPT = 1024
USUAL_BATCH = (8, 8 * 1024)

_LOADS = ("host_load_nbytes_per_s", "ssd_load_nbytes_per_s")


@dataclass(frozen=True, slots=True)
class Profile(CostProfile[float]):
    """A node's measurement of itself: the fields of ``protos.Profile``."""

    host_load_nbytes_per_s: float = 0.0  # from host memory into the pool; 0: not measured, or no such tier
    ssd_load_nbytes_per_s: float = 0.0

    @classmethod
    def from_record(cls, coefficients: Mapping[str, object]) -> Profile:
        """From a node record. Unknown and invalid entries are ignored; without any measured cost, the
        costs are those of ``UNKNOWN``.
        """
        known = {field.name for field in fields(cls)}
        values = {
            name: float(value)
            for name, value in coefficients.items()
            if name in known and isinstance(value, int | float) and 0 <= value < math.inf
        }
        if not any(value for name, value in values.items() if name not in _LOADS):
            return replace(UNKNOWN, **{name: values[name] for name in _LOADS if name in values})
        return cls(**(dict.fromkeys(known, 0.0) | values))


# A small model on a CPU, until the first requests correct it.
UNKNOWN = Profile(2e-3, 2e-5, 0.0, 1e-3, 2e-4, 0.0)


class NodeCost:
    """The profile of one node and its two corrections."""

    __slots__ = ("decode_correction", "prefill_correction", "profile")

    def __init__(
        self, profile: Profile, prefill: Correction | None = None, decode: Correction | None = None
    ) -> None:
        """``prefill`` and ``decode``: its corrections. None: it differs from no other node."""
        self.profile = profile
        self.prefill_correction = prefill or Correction()
        self.decode_correction = decode or Correction()

    def measured(self, profile: Profile, now_s: float) -> None:
        """The node has measured itself as ``profile``."""
        self.profile = profile
        self.prefill_correction.measured(profile.prefill_s(USUAL_PROMPT, 0), now_s)
        self.decode_correction.measured(profile.step_s(*USUAL_BATCH), now_s)

    @property
    def knows_prefills(self) -> bool:
        """Whether enough was measured to judge the node by what its prefills should take."""
        return True

    def prefill_s(self, uncached_tokens: int, cached_tokens: int, now_s: float) -> float:
        return self.profile.prefill_s(uncached_tokens, cached_tokens) * self.prefill_correction.factor(now_s)

    def load_s(self, host_nbytes: int, ssd_nbytes: int) -> float:
        """Load blocks from slower tiers into the pool."""
        host = self.profile.host_load_nbytes_per_s or _UNKNOWN_HOST_NBYTES_PER_S
        ssd = self.profile.ssd_load_nbytes_per_s or _UNKNOWN_SSD_NBYTES_PER_S
        return host_nbytes / host + ssd_nbytes / ssd

    def step_s(self, num_sequences: float, context_tokens: float, now_s: float) -> float:
        return self.profile.step_s(num_sequences, context_tokens) * self.decode_correction.factor(now_s)


# Of prediction errors, and the latest of each kind that count.
QUANTILES = (0.5, 0.9, 0.95, 0.99)
ERRORS_KEPT = 256


class PredictionErrors:
    """Absolute errors in percent of what was measured, and the latest pairs of predicted and measured."""

    def __init__(self, window: int = ERRORS_KEPT) -> None:
        self._percents: deque[float] = deque(maxlen=window)
        self._latest: deque[tuple[float, float]] = deque(maxlen=48)
        self.count = 0

    def add(self, predicted: float, actual: float) -> None:
        if actual > 0:
            self._percents.append(100 * abs(predicted - actual) / actual)
            self._latest.append((predicted, actual))
            self.count += 1

    def latest(self) -> list[tuple[float, float]]:
        """(predicted, measured), rounded to a millionth, for charts."""
        return [(round(predicted, 6), round(actual, 6)) for predicted, actual in self._latest]

    def quantile(self, q: float) -> float | None:
        """The ``q`` quantile (0 … 1) in percent; None: nothing was measured yet."""
        if not self._percents:
            return None
        ordered = sorted(self._percents)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)]

    def to_dict(self) -> dict[str, float | int | None]:
        percents = {f"p{100 * q:g}_percent": self.quantile(q) for q in QUANTILES}
        return {"count": self.count, **percents}


class CostModel:
    """All estimates of one conductor: nodes, links and output lengths, with their errors."""

    def __init__(self, regions: RegionLinks | None = None) -> None:
        self.links = LinkModel(regions=regions)
        self.prefill_correction = Correction()
        self.decode_correction = Correction()
        self._usual_prefill, self._usual_step = Usual(), Usual()
        self.errors = {name: PredictionErrors() for name in ("ttft", "prefill", "step", "transfer")}
        self._histograms = {name: core_metrics.prediction_error.labels(name) for name in self.errors}
        for name, errors in self.errors.items():
            for q in QUANTILES:
                gauge = core_metrics.prediction_error_percent.labels(name, f"{100 * q:g}")
                gauge.set_function(partial(_percent, errors, q))
        self.output_lengths = OutputLengths()

    def node(self, profile: Profile, now_s: float = 0.0) -> NodeCost:
        """The cost of a new node, corrected as the others are."""
        cost = NodeCost(
            profile,
            Correction(self.prefill_correction, self._usual_prefill),
            Correction(self.decode_correction, self._usual_step),
        )
        cost.measured(profile, now_s)
        return cost

    def observe_ttft(self, predicted_s: float, actual_s: float) -> None:
        """From admission to the first token."""
        self.check("ttft", predicted_s, actual_s)

    def observe_prefill(
        self, node: NodeCost, *, uncached_tokens: int, cached_tokens: int, actual_s: float, now_s: float
    ) -> None:
        """A prefill node reported its compute time, without waiting and fetching."""
        self.check("prefill", node.prefill_s(uncached_tokens, cached_tokens, now_s), actual_s)
        plain_s = node.profile.prefill_s(uncached_tokens, cached_tokens)
        node.prefill_correction.observe(plain_s, actual_s, now_s)

    def observe_steps(self, node: NodeCost, *, plain_s: float, actual_s: float, now_s: float) -> None:
        """Several steps in a row took ``actual_s``; ``plain_s``: by the profile, uncorrected."""
        self.check("step", plain_s * node.decode_correction.factor(now_s), actual_s)
        node.decode_correction.observe(plain_s, actual_s, now_s)

    def observe_transfer(
        self,
        source: str,
        target: str,
        *,
        nbytes: int,
        actual_s: float,
        now_s: float,
        predicted_s: float | None = None,
    ) -> None:
        """``target`` read blocks from ``source`` (node ids). ``predicted_s``: when it began; None: as now."""
        if predicted_s is None:
            predicted_s = self.links.seconds(source, target, nbytes, now_s)
        self.check("transfer", predicted_s, actual_s)
        self.links.observe(source, target, nbytes, actual_s)

    def check(self, estimate: str, predicted_s: float, actual_s: float) -> None:
        """Record the error of a prediction; ``estimate``: ttft, prefill, step or transfer."""
        if actual_s > 0:
            self.errors[estimate].add(predicted_s, actual_s)
            self._histograms[estimate].observe(abs(predicted_s - actual_s) / actual_s)


def _percent(errors: PredictionErrors, q: float) -> float:
    percent = errors.quantile(q)
    return math.nan if percent is None else percent
