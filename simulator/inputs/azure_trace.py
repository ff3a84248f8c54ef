"""The Azure LLM inference traces: arrivals and lengths, without prefixes."""

from __future__ import annotations

import csv
import gzip
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from moonpool.simulator.inputs.trace import TraceInvalid, TraceRequest

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Copies of a request arrive within this time, so that a multiplied trace keeps its shape over seconds.
_SPREAD_S = 10.0


def load_azure_trace(path: Path) -> list[TraceRequest]:
    """Read a CSV file, gzipped or not: ``TIMESTAMP, ContextTokens, GeneratedTokens``.

    Returns the requests in order of arrival, from 0 s on, without block ids: shared prefixes are not
    known. Raises ``TraceInvalid``.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    rows: list[tuple[float, int, int]] = []
    try:
        with opener(path, "rt", newline="") as lines:
            table = csv.DictReader(lines)
            if tuple(table.fieldnames or ()) != _COLUMNS:
                raise TraceInvalid(f"{path} must have the columns {', '.join(_COLUMNS)}")
            for number, row in enumerate(table, 2):
                rows.append(_row(f"{path}, line {number}", row))
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise TraceInvalid(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not rows:
        raise TraceInvalid(f"{path} has no requests")
    began_s = min(row[0] for row in rows)
    return [TraceRequest(at_s - began_s, prompt, output, ()) for at_s, prompt, output in sorted(rows)]


def _row(where: str, row: dict[str, str]) -> tuple[float, int, int]:
    """The arrival in seconds of Unix time, prompt and output tokens."""
    try:
        stamp, prompt, output = (row[name] for name in _COLUMNS)
        whole, _, fraction = stamp.partition(".")  # of a second, in seven digits
        at_s = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        lengths = int(prompt), max(int(output), 1)
    except (TypeError, ValueError) as error:
        raise TraceInvalid(f"{where}: {error}") from error
    if lengths[0] < 1:
        raise TraceInvalid(f"{where}: a prompt has at least 1 token, got {lengths[0]}")
    return (at_s, *lengths)


def times(requests: Sequence[TraceRequest], copies: int, *, seed: int = 1) -> list[TraceRequest]:
    """Return ``copies`` of each request, arriving up to some seconds apart."""
    if copies == 1:
        return list(requests)
    rng = random.Random(seed)
    found = [
        replace(request, arrival_s=request.arrival_s + rng.uniform(0, _SPREAD_S))
        for request in requests
        for _ in range(copies)
    ]
    return sorted(found, key=lambda request: request.arrival_s)
