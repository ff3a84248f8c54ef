"""How one request recovers from failed attempts: how long each part takes, and what is computed twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures


@dataclass(slots=True)
class _Failed:
    failure: FailureClass
    cause: str
    at_s: float
    silent_s: float
    contain_s: float = -1.0  # negative: not placed again


class Recovery:
    """From failed attempts to the request's next token. Times are those of the request's clock."""

    def __init__(self) -> None:
        self._failed: list[_Failed] = []  # without a token since
        self._num_computed = 0  # tokens that had KV in an earlier attempt; 0: none answered

    def failed(
        self, failure: FailureClass, cause: str, *, now_s: float, silent_s: float, num_tokens: int
    ) -> None:
        """An attempt failed. ``silent_s``: from its last message to its failure; ``num_tokens``: of the
        request, streamed ones included."""
        failures.count(failure, cause)
        failures.detect_s.labels(failure.value).observe(silent_s)
        self._decide("failed")
        if self._num_computed:
            self._num_computed = max(self._num_computed, num_tokens - 1)  # the last token has no KV
        self._failed.append(_Failed(failure, cause, now_s, silent_s))

    def placed(self, now_s: float) -> None:
        """The request was placed, perhaps again."""
        if self._failed and self._failed[-1].contain_s < 0:
            last = self._failed[-1]
            last.contain_s = now_s - last.at_s
            failures.contain_s.labels(last.failure.value).observe(last.contain_s)

    def token(self, num_tokens: int, num_cached_tokens: int, now_s: float) -> dict[str, Any] | None:
        """An attempt answered with its first token. Returns the facts of the recovery; None: it is none.

        ``num_tokens``: that have KV now; ``num_cached_tokens``: of those, not computed for it.
        """
        num_twice = max(min(self._num_computed, num_tokens) - num_cached_tokens, 0)
        self._num_computed = max(self._num_computed, num_tokens)
        if not self._failed:
            return None
        self._decide("recovered")
        for one in self._failed:
            failures.recover_s.labels(one.failure.value).observe(now_s - one.at_s)
        first, last = self._failed[0], self._failed[-1]
        failures.recomputed_tokens.labels(last.failure.value).inc(num_twice)
        self._failed = []
        return {
            "class": last.failure.value,
            "cause": last.cause,
            "silent_s": first.silent_s,
            "contain_s": last.contain_s,
            "recover_s": now_s - first.at_s,
            "recomputed_tokens": num_twice,
        }

    def ended(self) -> None:
        """The request ended. Idempotent."""
        self._decide("failed")
        self._failed = []

    def _decide(self, outcome: str) -> None:
        """The outcome of the latest retry, if there was one."""
        if self._failed and self._failed[-1].contain_s >= 0:
            failures.retries.labels(self._failed[-1].failure.value, outcome).inc()
