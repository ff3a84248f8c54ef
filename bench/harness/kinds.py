"""Which figures beside ours are limits of the machine, which are other systems', and which our own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from moonpool.bench.harness.peers import ENVIRONMENTS
from moonpool.runtime.reports.conditions import BASELINE, LIMIT, PEER
from moonpool.runtime.reports.report import Row

# What the machine does without us: its memory, disk, wire or processor, or a structure without our work.
_LIMITS = (
    *(r"memcpy\b.*", r"raw (disk|sockets)\b.*", r"cudaMemcpy\b.*", r"limit of .*", r"floor"),
    *(r"large (copy|read|matmul|product)\b.*", r"plain dict", r"the transfer path itself"),
)
# Other systems: those with an environment of their own, those that are imported, and published figures.
_PEERS = (
    *(rf"{re.escape(name)}\b.*" for name in ENVIRONMENTS),
    *(r"transformers\b.*", r"vllm\b.*", r"vLLM alone", r"torch\b.*", r"SDPA\b.*", r"FlashInfer\b.*"),
    *(r"flashinfer\b.*", r"flex_attention\b.*", r"paper"),
)
_KINDS = ((LIMIT, re.compile("|".join(_LIMITS))), (PEER, re.compile("|".join(_PEERS))))


def kind_of(peer: str) -> str:
    """One of ``conditions.KINDS``. A name that is in neither list is our own work in another form."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(peer)), BASELINE)


def with_kinds(rows: Iterable[Row]) -> list[Row]:
    """The rows, each that has a peer with its kind."""
    return [
        row if row.peer is None or row.peer_kind else replace(row, peer_kind=kind_of(row.peer))
        for row in rows
    ]
