"""``moonpool trace``: a request's timeline as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from moonpool.commands.options import console, output_option, run_with_client, url_option
from moonpool.conductor.observing.timelines.spans import CONDUCTOR, TimelineSpan, spans_of

API = "api"  # the conductor's HTTP side


@click.command("trace")
@url_option
@click.argument("request_id")
@output_option(help="File to write (default: trace-REQUEST_ID.json).")
def trace_command(url: str, request_id: str, output: Path | None) -> None:
    """Say where a request's time went; write its timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

    REQUEST_ID is the answer's id, or the x-request-id the client sent; the conductor keeps the latest ones.
    """
    timeline = run_with_client(url, lambda client: client.timeline(request_id))
    for sequence in timeline.get("sequences") or [timeline]:
        _print_parts(sequence)
    trace = chrome_trace(timeline)
    file = output or Path(f"trace-{request_id}.json")
    file.write_text(json.dumps(trace))
    console.print(f"{len(trace['traceEvents'])} events in {file}: open it at ui.perfetto.dev")


def _print_parts(sequence: Mapping[str, Any]) -> None:
    console.print(f"{sequence['request_id']}: {sequence['explanation'] or 'nothing has happened yet'}")
    for part in sorted(sequence["parts"], key=lambda part: -part["seconds"]):
        console.print(f"  {1e3 * part['seconds']:9.1f} ms  {part['sentence']}")
    for event in sequence["events"]:
        if sentence := _failure(event):
            console.print(f"  {1e3 * event['at_s']:9.1f} ms  {sentence}")


def _failure(event: Mapping[str, Any]) -> str:
    """What an event says of a failure; empty: nothing."""
    match event["event"]:
        case "retry":
            return (
                f"after the start an attempt failed ({event['class']}, {event['cause']}): {event['reason']}"
            )
        case "recovered":
            return (
                f"after the start it had recovered: placed again {1e3 * event['contain_s']:.1f} ms after the "
                f"failure, its next token after {1e3 * event['recover_s']:.1f} ms, "
                f"{event['recomputed_tokens']} tokens computed twice"
            )
        case "done" if "class" in event:
            return f"after the start it ended ({event['class']}): {event['error']}"
    return ""


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
