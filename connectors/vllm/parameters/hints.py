"""Hints of a request about its own blocks: keep them, fetch them early, let them go.

They come as ``cache_hint`` in the request's parameters, or as actions of vLLM's envelope ``kv_hints``, which
its OpenAI server does not pass on. A hint may be ignored, and never fails a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from moonpool.connectors.vllm.engine_request import EngineRequest
from moonpool.connectors.vllm.lookup.prefix_index import Holder
from moonpool.kvstore.blocks.keys import BlockKey

_HINT = "cache_hint"
# The actions of an envelope, and the field of each one's payload with its field in a ``cache_hint``.
_ACTIONS = {
    "kv.pin": ("ttl_s", "pin_s", None),
    "kv.prefetch": ("", "prefetch", True),
    "kv.drop": ("from_token", "drop_from", 0),
}
_VERSION = "1"
# Actions that are read of one envelope.
_MOST_ACTIONS = 16

Action = Literal["pin", "prefetch", "drop", "let_go"]


@dataclass(frozen=True, slots=True)
class Hints:
    """``drop_from``: a token of the prompt; None: nothing is dropped. ``drop_after``: what no other prompt
    shares is evicted before all others."""

    pin_s: float = 0.0
    prefetch: bool = False
    drop_from: int | None = None
    drop_after: bool = False

    def first_dropped(self, block_size: int) -> int | None:
        """The first block that is dropped: one that has no token before ``drop_from``."""
        return None if self.drop_from is None else -(-self.drop_from // block_size)


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class HintedBlocks:
    """What the store is to do with ``keys``, a chain from its first block on."""

    request_id: str
    action: Action
    keys: list[BlockKey]
    ttl_s: float = 0.0  # pin: for how long
    first: int = 0  # drop: the first block that goes
    source: bytes = b""  # prefetch: KvAddress of another node, packed; empty: from the own disk

    def is_prefetch_of(self, request_id: str) -> bool:
        return (self.action, self.request_id) == ("prefetch", request_id)


def prefetch_of(
    request_id: str, keys: list[BlockKey], holders: Sequence[Holder], own_id: str
) -> Iterator[HintedBlocks]:
    """Fetch the longest prefix of ``keys`` that a node has; nothing if it is in this one's memory already."""
    longest = max(holders, key=lambda holder: (holder.num_blocks, holder.node_id == own_id), default=None)
    if longest is None:
        return
    is_own = longest.node_id == own_id
    if not is_own or longest.num_on_disk:
        source = b"" if is_own else longest.address
        yield HintedBlocks(request_id, "prefetch", keys[: longest.num_blocks], source=source)


def at_end(
    hints: Hints, request_id: str, keys: list[BlockKey], num_saved: int, block_size: int
) -> Iterator[HintedBlocks]:
    """What to do once a request has ended. ``num_saved`` of its first ``keys`` are saved, or being saved."""
    if hints.pin_s and num_saved:
        yield HintedBlocks(request_id, "pin", keys[:num_saved], ttl_s=hints.pin_s)
    first = hints.first_dropped(block_size)
    if first is not None and first < len(keys):
        yield HintedBlocks(request_id, "drop", keys, first=first)
    if hints.drop_after and num_saved:
        yield HintedBlocks(request_id, "let_go", keys[:num_saved])


def hints_of(request: EngineRequest, ignored: Callable[[str], None]) -> Hints:
    """Read the hints of a request; the last of a kind counts. ``ignored`` is told of those that cannot be
    read."""
    found: dict[str, Any] = {}
    for name, value in _given(request, ignored):
        if _is_valid(name, value):
            found[name] = value
        else:
            ignored(f"{name[:64]}={str(value)[:64]}")
    return Hints(**found) if found else NO_HINTS


def _given(request: EngineRequest, ignored: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    hint = (request.kv_transfer_params or {}).get(_HINT)
    if isinstance(hint, Mapping):
        yield from ((str(name), value) for name, value in hint.items())
    elif hint is not None:
        ignored(f"{_HINT} that is no object")
    envelope = getattr(request, "kv_hints", None)
    if envelope is None:
        return
    for action in islice(envelope.actions, _MOST_ACTIONS):
        known = _ACTIONS.get(action.action_type)
        if known is None or action.action_version.partition(".")[0] != _VERSION:
            ignored(f"{action.action_type[:64]}@{action.action_version[:64]}")
            continue
        field, name, default = known
        yield name, action.payload.get(field, default)


def _is_valid(name: str, value: Any) -> bool:
    # True and False are whole numbers in Python.
    match name:
        case "pin_s":
            return type(value) in (int, float) and math.isfinite(value) and value > 0
        case "prefetch" | "drop_after":
            return type(value) is bool
        case "drop_from":
            return type(value) is int and value >= 0
    return False
