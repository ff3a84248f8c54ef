"""Metrics of the transfer engine, for all agents of the process together."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

_LABELS = ("path", "direction")
_TOTALS = ("nbytes", "seconds", "batches", "failures", "retries", "in_flight")
MIN_SAMPLE_NBYTES = 1 << 20
"""Smaller batches measure latency, not bandwidth."""
_NEW_WEIGHT = 0.2

BYTES = Counter("moonpool_transfer_bytes_total", "Bytes moved by finished batches", _LABELS)
SPANS = Counter("moonpool_transfer_spans_total", "Spans moved by finished batches", _LABELS)
SECONDS = Histogram(
    "moonpool_transfer_batch_seconds",
    "Time from the call to the end of finished batches",
    _LABELS,
    buckets=(1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
FAILURES = Counter(
    "moonpool_transfer_failures_total", "Batches that ended in an error", ("direction", "cause")
)
FAILED_ATTEMPTS = Counter(
    "moonpool_transfer_failed_attempts_total", "Attempts over a path that failed", _LABELS
)
RETRIES = Counter("moonpool_transfer_retries_total", "Failed attempts that were followed by another", _LABELS)
ATTEMPTS = Gauge("moonpool_transfer_attempts", "Attempts in progress", _LABELS)
RAIL_FAILURES = Counter(
    "moonpool_transfer_rail_failures_total", "Pauses of one of several addresses of a peer", ("path",)
)
CHECKSUM_MISMATCHES = Counter(
    "moonpool_transfer_checksum_mismatches_total", "Spans that arrived with a wrong checksum", ("direction",)
)
IN_FLIGHT_BYTES = Gauge("moonpool_transfer_in_flight_bytes", "Bytes of batches in progress", ("direction",))
BANDWIDTH = Gauge(
    "moonpool_transfer_bandwidth_bytes_per_second",
    "Moving average over batches of 1 MiB and more, all peers together",
    _LABELS,
)
NOTES = Counter("moonpool_transfer_notes_total", "Notifications", ("direction",))
REFUSED = Counter("moonpool_transfer_refused_connections_total", "Connections that did not authenticate")


@dataclass(frozen=True, slots=True)
class PathMetrics:
    """The metrics of one path and direction."""

    nbytes: Counter
    spans: Counter
    seconds: Histogram
    bandwidth: MovingBandwidth
    failed: Counter
    retries: Counter
    attempts: Gauge


class MovingBandwidth:
    """A gauge that follows the bandwidth of batches."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._value = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        if nbytes >= MIN_SAMPLE_NBYTES and seconds > 0:
            self._value = moving_average(self._value, nbytes / seconds)
            self._gauge.set(self._value)


def moving_average(average: float, sample: float) -> float:
    """``average`` moved towards a positive ``sample``; an average of 0 means that there was none yet."""
    return average + _NEW_WEIGHT * (sample - average) if average else sample


@functools.cache
def of_path(path: str, direction: str) -> PathMetrics:
    return PathMetrics(
        BYTES.labels(path, direction),
        SPANS.labels(path, direction),
        SECONDS.labels(path, direction),
        MovingBandwidth(BANDWIDTH.labels(path, direction)),
        FAILED_ATTEMPTS.labels(path, direction),
        RETRIES.labels(path, direction),
        ATTEMPTS.labels(path, direction),
    )


def path_totals() -> dict[str, dict[str, Any]]:
    """Totals of each path since the process began, both directions together. Takes 0.1 ms.

    buckets: pairs of a limit in seconds and the number of batches that took at most so long.
    """
    found: dict[str, dict[str, Any]] = {}
    for metric, name in (
        (BYTES, "nbytes"),
        (FAILED_ATTEMPTS, "failures"),
        (RETRIES, "retries"),
        (ATTEMPTS, "in_flight"),
        (SECONDS, "batches"),
    ):
        for sample in next(iter(metric.collect())).samples:
            path = found.setdefault(sample.labels["path"], dict.fromkeys(_TOTALS, 0) | {"buckets": {}})
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                if bound != math.inf:
                    path["buckets"][bound] = path["buckets"].get(bound, 0) + int(sample.value)
            elif sample.name.endswith("_seconds_sum"):
                path["seconds"] += round(sample.value, 6)
            elif not sample.name.endswith("_created"):
                path[name] += int(sample.value)
    for path in found.values():
        path["buckets"] = [list(pair) for pair in path["buckets"].items()]
    return found


@functools.cache
def in_flight(direction: str) -> Gauge:
    return IN_FLIGHT_BYTES.labels(direction)
