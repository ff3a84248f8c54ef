"""``moonpool trace``: a request's timeline as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from moonpool.commands.options import console, output_option, run_with_client, url_option
from moonpool.conductor.observing.timelines.chrome import chrome_trace


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
