"""Traces: requests with arrival times, lengths and block ids."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import ConfigError

# Tokens of one id in a Mooncake trace.
BLOCK_TOKENS = 512


class TraceInvalid(ConfigError):
    """A trace cannot be used; the sentence names file and line."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, key="trace")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``block_ids``: one for each started block of the prompt; equal ids mean equal prefixes."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def load_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Read JSON lines, gzipped or not: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

    Returns the requests in order of arrival. Raises ``TraceInvalid``.
    """
    requests: list[TraceRequest] = []
    parents: dict[int, int] = {}
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    requests.append(_request(where, line, block_tokens))
                    _check_chain(where, requests[-1].block_ids, parents)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise TraceInvalid(f"{path} cannot be read: {error}") from error
    if not requests:
        raise TraceInvalid(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(where: str, line: str, block_tokens: int) -> TraceRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceInvalid(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise TraceInvalid(f"{where}: not a JSON object")
    timestamp = _number(where, fields, "timestamp", 0)
    input_tokens = int(_number(where, fields, "input_length", 1))
    output_tokens = int(_number(where, fields, "output_length", 1))
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(each, int) and each >= 0 for each in ids):
        raise TraceInvalid(f"{where}: hash_ids must be a list of whole numbers")
    needed = -(-input_tokens // block_tokens)
    if len(ids) != needed:
        raise TraceInvalid(
            f"{where}: {input_tokens} tokens are {needed} blocks of {block_tokens}, but hash_ids names "
            f"{len(ids)} (--block-tokens says how many tokens an id stands for)"
        )
    return TraceRequest(timestamp / 1e3, input_tokens, output_tokens, tuple(ids))


def _number(where: str, fields: dict[str, Any], name: str, least: int) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e15:
        raise TraceInvalid(f"{where}: {name} must be a number of {least} or more, got {value!r}")
    return value


def _check_chain(where: str, ids: tuple[int, ...], parents: dict[int, int]) -> None:
    """Check that an id, which names a whole prefix, always follows the same id."""
    before = -1
    for block_id in ids:
        if parents.setdefault(block_id, before) != before:
            raise TraceInvalid(f"{where}: id {block_id} followed another prefix in an earlier request")
        before = block_id


def at_speed(requests: Sequence[TraceRequest], speed: float, limit: int = 0) -> list[TraceRequest]:
    """Return the first ``limit`` (0: all) requests, arriving ``speed`` times as fast."""
    chosen = requests[:limit] if limit else requests
    return [replace(request, arrival_s=request.arrival_s / speed) for request in chosen]
