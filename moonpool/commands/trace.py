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
