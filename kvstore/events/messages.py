"""KV events as bytes: MessagePack in any of the three shapes that engines publish.

    batch as array, events as arrays    [ts, [["BlockStored", hashes, parent, …], …], rank]
    batch as array, events as maps      [ts, [{"type": "BlockStored", "block_hashes": …}, …], rank]
    all maps                            {"ts": …, "events": [{"type": …}, …], "data_parallel_rank": …}

Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.number_checks import UNIX_S, NumberOutOfRange, number

Hash = int | bytes  # of a block, by the engine
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class EventCorrupt(StoreError):
    """A payload is not a batch of KV events; ``str(error)`` tells why."""


# The order of the fields is that of the positional shape.


@dataclass(frozen=True, slots=True)
class BlockStored:
    """``block_hashes[i]`` holds ``token_ids[i * block_size : (i + 1) * block_size]`` after the block before
    it, the first after ``parent_block_hash`` (None: it begins a sequence)."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[Token]
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    lora_id: int | None = None
    medium: str | None = None  # "GPU", "CPU", "STORAGE"; None: the engine has one
    lora_name: str | None = None
    # Other inputs of each block's hash: adapter, images, salt.
    extra_keys: Sequence[Sequence[Any] | None] | None = None
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


_TYPES: dict[str, type[KvEvent]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_FIELDS = {name: [field.name for field in fields(kind)] for name, kind in _TYPES.items()}
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def decode(payload: bytes) -> EventBatch:
    """Decode a batch in any of the shapes. Raises ``EventCorrupt``; unknown kinds of events are ignored."""
    try:
        body = _unpack(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
    except NumberOutOfRange as error:
        raise EventCorrupt(f"a batch of KV events: {error}") from error
    found = [event for item in events if (event := _event(item)) is not None]
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
        return msgspec.convert(values, _TYPES[kind], builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise EventCorrupt(f"a {kind} is not as it should be: {error}") from error


def encode(batch: EventBatch) -> bytes:
    """Encode in the shape of current vLLM: an array batch of map events."""
    return _pack([batch.ts, [_as_map(event) for event in batch.events], batch.data_parallel_rank])


def _as_map(event: KvEvent) -> Mapping[str, Any]:
    kind = type(event).__name__
    values = {name: getattr(event, name) for name in _FIELDS[kind]}
    needed = ("parent_block_hash", "lora_id", "medium", "lora_name")
    return {"type": kind, **{k: v for k, v in values.items() if v is not None or k in needed}}
