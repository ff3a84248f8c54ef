"""A request's timeline as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.conductor.observing.timelines.spans import CONDUCTOR, TimelineSpan, spans_of

API = "api"  # the conductor's HTTP side


def chrome_trace(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a reply of ``GET /v1/requests/{id}/timeline`` to the Trace Event Format (JSON object form).

    Each node is a process, each sequence of the request a thread; times are µs since the Unix epoch.
    """
    sequences = timeline.get("sequences") or [timeline]
    rows: list[tuple[float, int, TimelineSpan]] = []
    for thread, sequence in enumerate(sequences, start=1):
        rows += [(sequence["started_unix_s"], thread, span) for span in spans_of(sequence)]
    if timeline.get("api"):
        rows += [(timeline["api"]["received_unix_s"], 0, span) for span in _api_spans(timeline["api"])]
    # The conductor comes first, then nodes by their first span.
    began_by_process = {CONDUCTOR: 0.0} | {
        span.process: began_s for began_s, _, span in sorted(rows, key=lambda row: row[0] + row[2].began_s)
    }
    numbers = {process: number for number, process in enumerate(began_by_process, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": process}}
        for process, number in numbers.items()
    ]
    for began_s, thread, span in rows:
        position = {"pid": numbers[span.process], "tid": thread, "ts": 1e6 * (began_s + span.began_s)}
        kind = {"ph": "X", "dur": 1e6 * span.seconds} if span.seconds else {"ph": "i", "s": "t"}
        events.append({"name": span.name, "cat": "moonpool", **kind, **position, "args": dict(span.facts)})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _api_spans(record: Mapping[str, Any]) -> list[TimelineSpan]:
    facts = {name: record[name] for name in ("id", "endpoint", "stream", "status", "ttft_s", "tpot_s")}
    parse_s, tokenize_s = record["parse_s"], record["tokenize_s"]
    return [
        TimelineSpan(API, record["endpoint"], 0.0, record["e2e_s"], facts),
        TimelineSpan(API, "parse", 0.0, parse_s),
        TimelineSpan(API, "tokenize", parse_s, tokenize_s),
    ]
