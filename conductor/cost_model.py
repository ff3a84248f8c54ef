"""Seconds a prefill, a decode step and a transfer will take: measured by the nodes, corrected online.

Placement, fetch-or-recompute and ``Retry-After`` all read these estimates, and how wrong they were is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from conductor import core_metrics
from conductor.link import LinkModel
from conductor.prediction import PredictionErrors

# A node that gave no profile yet: a small model on a CPU. Its first requests correct it.
_UNKNOWN_PREFILL_S = (2e-3, 2e-5, 0.0)
_UNKNOWN_DECODE_S = (1e-3, 2e-4, 0.0)

# A correction moves an eighth of the way to each new measurement, stays within a factor of eight of the
# node's own profile, and is half forgotten after a minute without news: a bad moment shuts no node out.
_WEIGHT = 1 / 8
_BOUND = 8.0
_HALF_LIFE_S = 60.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A node's own measurement of itself: the coefficients of ``protos.Profile``, by the same names."""

    prefill_base_s: float = _UNKNOWN_PREFILL_S[0]
    prefill_token_s: float = _UNKNOWN_PREFILL_S[1]
    prefill_attention_s: float = _UNKNOWN_PREFILL_S[2]
    decode_base_s: float = _UNKNOWN_DECODE_S[0]
    decode_sequence_s: float = _UNKNOWN_DECODE_S[1]
    decode_context_s: float = _UNKNOWN_DECODE_S[2]

    @classmethod
    def from_record(cls, coefficients: Mapping[str, float]) -> Profile:
        """From a node record; a node that measured nothing (all zero, or absent) gets the defaults."""
        known = {field.name for field in fields(cls)}
        values = {name: float(value) for name, value in coefficients.items() if name in known and value >= 0}
        if not any(values.values()):
            return cls()
        return cls(**(dict.fromkeys(known, 0.0) | values))

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Compute time of ``uncached_tokens`` whose attention also sees ``cached_tokens`` before them."""
        context = cached_tokens + uncached_tokens / 2  # of the average uncached token
        return (
            self.prefill_base_s
            + uncached_tokens * self.prefill_token_s
            + uncached_tokens * context * self.prefill_attention_s
        )

    def step_s(self, num_sequences: int, context_tokens: int) -> float:
        """Time of one decode step over ``num_sequences`` with ``context_tokens`` of KV together."""
        return (
            self.decode_base_s
            + num_sequences * self.decode_sequence_s
            + context_tokens * self.decode_context_s
        )


class Correction:
    """A factor on a node's profile that follows what was measured; 1 when nothing was."""

    def __init__(self) -> None:
        self._log = 0.0  # the factor's logarithm: twice as slow and twice as fast weigh the same
        self._since_s = 0.0

    def observe(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """``predicted_s`` is the profile's own, uncorrected."""
        if predicted_s <= 0 or actual_s <= 0:
            return
        target = math.log(min(max(actual_s / predicted_s, 1 / _BOUND), _BOUND))
        log = self._log * self._kept(now_s)
        self._log = log + _WEIGHT * (target - log)
        self._since_s = now_s

    def factor(self, now_s: float) -> float:
        return math.exp(self._log * self._kept(now_s)) if self._log else 1.0

    def _kept(self, now_s: float) -> float:
        return math.exp2(-max(now_s - self._since_s, 0.0) / _HALF_LIFE_S)


class NodeCost:
    """The profile of one node with its two corrections."""

    __slots__ = ("decode_correction", "prefill_correction", "profile")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.prefill_correction = Correction()
        self.decode_correction = Correction()

    def prefill_s(self, uncached_tokens: int, cached_tokens: int, now_s: float) -> float:
        return self.profile.prefill_s(uncached_tokens, cached_tokens) * self.prefill_correction.factor(now_s)

    def step_s(self, num_sequences: int, context_tokens: int, now_s: float) -> float:
        return self.profile.step_s(num_sequences, context_tokens) * self.decode_correction.factor(now_s)


class CostModel:
    """All estimates of one conductor: links, output lengths, and how wrong the estimates were."""

    def __init__(self) -> None:
        self.links = LinkModel()
        self.errors = {name: PredictionErrors() for name in ("ttft", "prefill", "step", "transfer")}
        self._histograms = {name: core_metrics.prediction_error.labels(name) for name in self.errors}
        self._output_tokens = 128.0

    def observe_ttft(self, predicted_s: float, actual_s: float) -> None:
        """From admission to the first token."""
        self._check("ttft", predicted_s, actual_s)

    def observe_prefill(
        self, node: NodeCost, *, uncached_tokens: int, cached_tokens: int, actual_s: float, now_s: float
    ) -> None:
        """A prefill node reported its compute time; waiting and fetching are not part of it."""
        self._check("prefill", node.prefill_s(uncached_tokens, cached_tokens, now_s), actual_s)
        plain_s = node.profile.prefill_s(uncached_tokens, cached_tokens)
        node.prefill_correction.observe(plain_s, actual_s, now_s)

    def observe_step(
        self, node: NodeCost, *, num_sequences: int, context_tokens: int, actual_s: float, now_s: float
    ) -> None:
        """Time between two messages of a decode node that was busy in between."""
        self._check("step", node.step_s(num_sequences, context_tokens, now_s), actual_s)
        plain_s = node.profile.step_s(num_sequences, context_tokens)
        node.decode_correction.observe(plain_s, actual_s, now_s)

    def observe_transfer(self, source: str, target: str, *, nbytes: int, actual_s: float) -> None:
        """Blocks were read by ``target`` from ``source`` (node ids)."""
        self._check("transfer", self.links.seconds(source, target, nbytes), actual_s)
        self.links.observe(source, target, nbytes, actual_s)

    def observe_output(self, num_tokens: int) -> None:
        """A request ended by itself after ``num_tokens``."""
        self._output_tokens += _WEIGHT * (num_tokens - self._output_tokens)

    def expected_output_tokens(self, remaining_tokens: int) -> int:
        """How many tokens a request that may still produce ``remaining_tokens`` probably will."""
        return max(1, min(remaining_tokens, round(self._output_tokens)))

    def _check(self, estimate: str, predicted_s: float, actual_s: float) -> None:
        if actual_s > 0:
            self.errors[estimate].add(predicted_s, actual_s)
            self._histograms[estimate].observe(abs(predicted_s - actual_s) / actual_s)
