"""Metrics of failures by class: how many, and what a conductor knows of their course."""

from __future__ import annotations

import asyncio

from prometheus_client import Counter, Histogram

from moonpool.runtime.errors import MoonpoolError, RemoteError, failure_of
from moonpool.runtime.failures import CAUSES, FailureClass, cause_of_status

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_FAILURES = Counter(
    "moonpool_failures_total",
    "Failures, by what failed and why, each counted by the process that handles it",
    ["class", "cause"],
)
detect_s = Histogram(
    "moonpool_failure_detect_seconds",
    "From the last message of an attempt to the conductor's knowledge that it failed: detecting took at most "
    "as long",
    ["class"],
    buckets=_SECONDS,
)
contain_s = Histogram(
    "moonpool_failure_contain_seconds",
    "From a failed attempt until the request was placed again",
    ["class"],
    buckets=_SECONDS,
)
recover_s = Histogram(
    "moonpool_failure_recover_seconds",
    "From a failed attempt to the next token of its request",
    ["class"],
    buckets=_SECONDS,
)
retries = Counter(
    "moonpool_failure_retries_total",
    "Requests placed again after a failure: recovered (the next token came), or failed (they failed again, "
    "or ended without one)",
    ["class", "outcome"],
)
recomputed_tokens = Counter(
    "moonpool_failure_recomputed_tokens_total",
    "Tokens computed twice: they had KV in a failed attempt, and the next one found no copy of it",
    ["class"],
)


def count(failure: FailureClass, cause: str) -> None:
    """Count a failure. ``cause``: one of ``CAUSES``; any other word counts as ``error``."""
    _FAILURES.labels(failure.value, cause if cause in CAUSES else "error").inc()


def count_error(error: BaseException) -> None:
    """Count the failure that an exception stands for. A cancellation is none."""
    if isinstance(error, asyncio.CancelledError):
        return
    cause = "late" if isinstance(error, TimeoutError) else "error"
    if isinstance(error, MoonpoolError):
        cause = cause_of_status(error.status if isinstance(error, RemoteError) else error.code)
    count(failure_of(error), cause)
