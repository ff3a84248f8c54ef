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


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[Hash]
    medium: str | None = None
    group_idx: int | None = None


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
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_TYPES: dict[str, type[KvEvent]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
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
    if not isinstance(ts, int | float) or not isinstance(events, list):
        raise EventCorrupt(f"a batch of KV events must have a time and events, got {str(body)[:80]}")
    found = [event for item in events if (event := _event(item)) is not None]
    return EventBatch(float(ts), found, rank if isinstance(rank, int) else None)


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
    if isinstance(event, BlockStored):
        size, tokens = event.block_size, event.token_ids
        if not isinstance(size, int) or size <= 0 or not isinstance(tokens, list):
            raise EventCorrupt(f"a BlockStored must have token_ids and a block_size, got {size!r}")
        if not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in tokens):
            raise EventCorrupt("token_ids must be integers from 0 to 2^31 - 1")


def encode(batch: EventBatch) -> bytes:
    """Encode in the shape of current vLLM: an array batch of map events."""
    return _pack([batch.ts, [_as_map(event) for event in batch.events], batch.data_parallel_rank])


def _as_map(event: KvEvent) -> Mapping[str, Any]:
    kind = type(event).__name__
    values = {name: getattr(event, name) for name in _FIELDS[kind]}
    needed = ("parent_block_hash", "lora_id", "medium", "lora_name")
    return {"type": kind, **{k: v for k, v in values.items() if v is not None or k in needed}}
