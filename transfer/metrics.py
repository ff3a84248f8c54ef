"""What the transfer engine counts. One set for the process: agents in one process add up."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

_LABELS = ("path", "direction")
_MIN_SAMPLE_NBYTES = 1 << 20
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
RETRIES = Counter(
    "moonpool_transfer_retries_total", "Attempts that failed and were followed by another", _LABELS
)
RAIL_FAILURES = Counter(
    "moonpool_transfer_rail_failures_total",
    "Times that one of several addresses of a peer was left alone for a while",
    ("path",),
)
CHECKSUM_MISMATCHES = Counter(
    "moonpool_transfer_checksum_mismatches_total",
    "Spans that arrived with other bytes than promised",
    ("direction",),
)
IN_FLIGHT_BYTES = Gauge("moonpool_transfer_in_flight_bytes", "Bytes of batches under way", ("direction",))
BANDWIDTH = Gauge(
    "moonpool_transfer_bandwidth_bytes_per_second",
    "Moving average over batches of 1 MiB and more, all peers together",
    _LABELS,
)
NOTES = Counter("moonpool_transfer_notes_total", "Notifications", ("direction",))
REFUSED = Counter("moonpool_transfer_refused_connections_total", "Connections that did not prove themselves")


@dataclass(frozen=True, slots=True)
class PathMetrics:
    """The counters of one path and direction, with the labels looked up once."""

    nbytes: Counter
    spans: Counter
    seconds: Histogram
    bandwidth: MovingBandwidth


class MovingBandwidth:
    """A gauge that follows what batches reach."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._value = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        # Smaller ones measure latency.
        if nbytes < _MIN_SAMPLE_NBYTES or seconds <= 0:
            return
        sample = nbytes / seconds
        self._value += (sample - self._value) * (_NEW_WEIGHT if self._value else 1.0)
        self._gauge.set(self._value)


@functools.cache
def of_path(path: str, direction: str) -> PathMetrics:
    return PathMetrics(
        BYTES.labels(path, direction),
        SPANS.labels(path, direction),
        SECONDS.labels(path, direction),
        MovingBandwidth(BANDWIDTH.labels(path, direction)),
    )


@functools.cache
def in_flight(direction: str) -> Gauge:
    return IN_FLIGHT_BYTES.labels(direction)
