"""KV events as bytes: MessagePack in any of the three shapes that engines publish.

    batch as array, events as arrays    [ts, [["BlockStored", hashes, parent, …], …], rank]
    batch as array, events as maps      [ts, [{"type": "BlockStored", "block_hashes": …}, …], rank]
    all maps                            {"ts": …, "events": [{"type": …}, …], "data_parallel_rank": …}

Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.number_checks import UNIX_S, NumberOutOfRange, Range, integer, number

Hash = int | bytes  # of a block, by the engine


class EventCorrupt(StoreError):
    """A payload is not a batch of KV events; ``str(error)`` tells why."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """``block_hashes[i]`` holds ``token_ids[i * block_size : (i + 1) * block_size]`` after the block before
    it, the first after ``parent_block_hash`` (None: it begins a sequence)."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str | None = None  # "GPU", "CPU", "STORAGE"; None: the engine has one
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None  # other inputs of each block's hash: adapter, images, salt
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None  # "LOCAL"; "REMOTE": the medium is not the engine's own; None: not said


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    ts: float  # unix seconds
    events: Sequence[KvEvent]
    data_parallel_rank: int | None = None


# The order of the positional shape.
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}
_TYPES: dict[str, type[KvEvent]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_OPTIONAL: dict[str, type] = {
    "medium": str,
    "lora_id": int,
    "lora_name": str,
    "extra_keys": list,
    "group_idx": int,
    "kv_cache_spec_kind": str,
    "kv_cache_spec_sliding_window": int,
    "locality": str,
}
_BLOCK_SIZE = Range(1, 1 << 20)
_TOKEN = Range(0, (1 << 31) - 1)
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def decode(payload: bytes) -> EventBatch:
    """Decode a batch in any of the shapes. Raises ``EventCorrupt``; unknown kinds of events are ignored."""
    try:
        body = _unpack(payload)
    except msgspec.DecodeError as error:
        raise EventCorrupt(f"a batch of KV events is not MessagePack: {error}") from error
    if isinstance(body, dict):
        ts, events, rank = body.get("ts"), body.get("events"), body.get("data_parallel_rank")
    elif isinstance(body, list) and len(body) >= 2:
        ts, events, rank = body[0], body[1], body[2] if len(body) > 2 else None
    else:
        raise EventCorrupt(f"a batch of KV events must be an array or a map, got {str(body)[:80]}")
    if not isinstance(events, list):
        raise EventCorrupt(f"a batch of KV events must have events, got {str(body)[:80]}")
    try:
        ts = number("ts", ts, UNIX_S)
        found = [event for item in events if (event := _event(item)) is not None]
    except NumberOutOfRange as error:
        raise EventCorrupt(f"a batch of KV events: {error}") from error
    return EventBatch(ts, found, rank if isinstance(rank, int) else None)


def _event(item: Any) -> KvEvent | None:
    if isinstance(item, list) and item and isinstance(item[0], str):
        kind = item[0]
        values = dict(zip(_FIELDS.get(kind, ()), item[1:], strict=False))
    elif isinstance(item, dict) and isinstance(item.get("type"), str):
        kind = item["type"]
        values = {name: item[name] for name in _FIELDS.get(kind, ()) if name in item}
    else:
        raise EventCorrupt(f"a KV event must begin with its name or have a type, got {str(item)[:80]}")
    if kind not in _TYPES:
        return None
    try:
        event = _TYPES[kind](**values)
    except TypeError as error:
        raise EventCorrupt(f"a {kind} lacks fields: {error}") from error
    _check(event)
    return event


def _check(event: KvEvent) -> None:
    if isinstance(event, AllBlocksCleared):
        return
    hashes = event.block_hashes
    if not isinstance(hashes, list) or not all(isinstance(name, int | bytes) for name in hashes):
        raise EventCorrupt(f"block_hashes must be integers or bytes, got {str(hashes)[:80]}")
    for name in _FIELDS[type(event).__name__]:
        value, kind = getattr(event, name), _OPTIONAL.get(name)
        if kind is not None and value is not None and not isinstance(value, kind):
            raise EventCorrupt(f"{name} must be of type {kind.__name__}, got {str(value)[:80]}")
    if isinstance(event, BlockStored):
        parent, tokens = event.parent_block_hash, event.token_ids
        if parent is not None and not isinstance(parent, int | bytes):
            raise EventCorrupt(f"parent_block_hash must be an integer or bytes, got {str(parent)[:80]}")
        if not isinstance(tokens, list):
            raise EventCorrupt(f"token_ids must be a list, got {str(tokens)[:80]}")
        integer("block_size", event.block_size, _BLOCK_SIZE)
        for token in tokens:
            integer("token_ids", token, _TOKEN)
        if not all(extra is None or isinstance(extra, list) for extra in event.extra_keys or ()):
            raise EventCorrupt(f"extra_keys must be lists, got {str(event.extra_keys)[:80]}")


def encode(batch: EventBatch) -> bytes:
    """Encode in the shape of current vLLM: an array batch of map events."""
    return _pack([batch.ts, [_as_map(event) for event in batch.events], batch.data_parallel_rank])


def _as_map(event: KvEvent) -> Mapping[str, Any]:
    kind = type(event).__name__
    values = {name: getattr(event, name) for name in _FIELDS[kind]}
    needed = ("parent_block_hash", "lora_id", "medium", "lora_name")
    return {"type": kind, **{k: v for k, v in values.items() if v is not None or k in needed}}
