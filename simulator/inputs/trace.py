"""Traces: requests with arrival times, lengths and block ids."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from moonpool.conductor.admission.tenants import ANYONE, EVERYWHERE, Regions, Tenant
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError

# Tokens of one id in a Mooncake trace.
BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    """A line of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]  # tokens
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


_DECODER = msgspec.json.Decoder(_Line)


class TraceInvalid(ConfigError):
    """A trace cannot be used; the text names file and line."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, key="trace")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``block_ids``: one for each started block of the prompt; equal ids mean equal prefixes.

    ``slo``: None: the cluster's. ``origin``: the region that it comes from; ``regions``: those that it is
    confined to, no others' blocks of the same ids included. ``adapter``: the LoRA adapter; empty: none.
    ``client``: the tenant, of which limits and weight count here.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    origin: str = ""
    regions: Regions = EVERYWHERE
    adapter: str = ""
    slo: Slo | None = None
    client: Tenant = ANYONE


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
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise TraceInvalid(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not requests:
        raise TraceInvalid(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(where: str, line: str, block_tokens: int) -> TraceRequest:
    try:
        fields = _DECODER.decode(line)
    except msgspec.MsgspecError as error:
        raise TraceInvalid(f"{where}: {error}") from error
    needed = -(-fields.input_length // block_tokens)
    if len(fields.hash_ids) != needed:
        raise TraceInvalid(
            f"{where}: {fields.input_length} tokens are {needed} blocks of {block_tokens}, but hash_ids has "
            f"{len(fields.hash_ids)} (--block-tokens sets the tokens of an id)"
        )
    return TraceRequest(fields.timestamp / 1e3, fields.input_length, fields.output_length, fields.hash_ids)


def _check_chain(where: str, ids: tuple[int, ...], parents: dict[int, int]) -> None:
    """Check that an id, which names a whole prefix, always follows the same id."""
    before = -1
    for block_id in ids:
        if parents.setdefault(block_id, before) != before:
            raise TraceInvalid(f"{where}: id {block_id} followed another prefix in an earlier request")
        before = block_id


def beside(requests: Sequence[TraceRequest], others: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return both in order of arrival, with no prefix in common."""
    first = 1 + max((block_id for request in requests for block_id in request.block_ids), default=0)
    apart = [
        replace(other, block_ids=tuple(first + block_id for block_id in other.block_ids)) for other in others
    ]
    return sorted([*requests, *apart], key=lambda request: request.arrival_s)


def at_speed(requests: Sequence[TraceRequest], speed: float, limit: int = 0) -> list[TraceRequest]:
    """Return the first ``limit`` (0: all) requests, arriving ``speed`` times as fast. Raises ConfigError."""
    if not speed > 0:
        raise ConfigError(f"--speed must be above 0, got {speed:g}", key="speed")
    chosen = requests[:limit] if limit else requests
    return [replace(request, arrival_s=request.arrival_s / speed) for request in chosen]
