"""The record of a block in the index on disk, and the recovery of records after a restart."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from moonpool.kvstore.blocks.keys import KEY_NBYTES, BlockKey

_HEAD = struct.Struct("<QQQ")
_CRC = struct.Struct("<I")
_LENGTHS = (_HEAD.size + _CRC.size, _HEAD.size + KEY_NBYTES + _CRC.size)


class BlockRecord(NamedTuple):
    """``sequence`` orders records by write: a block comes after its predecessor."""

    sequence: int
    key: BlockKey
    slot: int
    checksum: int  # xxh3-64 of the block's bytes
    parent: BlockKey | None


class StaleRecord(NamedTuple):
    """A record on disk that is out of date. ``sequence`` distinguishes it from a later one of the block."""

    key: BlockKey
    slot: int
    sequence: int


def encode(record: BlockRecord) -> bytes:
    """Return the value under ``record.key``, with its own checksum."""
    body = _HEAD.pack(record.sequence, record.slot, record.checksum) + (record.parent or b"")
    return body + _CRC.pack(crc32(body, crc32(record.key)))


def decode(key: bytes, value: bytes) -> BlockRecord | None:
    """None: the bytes are not a record of this key."""
    if len(value) not in _LENGTHS or len(key) != KEY_NBYTES:
        return None
    body = value[: -_CRC.size]
    if _CRC.unpack_from(value, len(body))[0] != crc32(body, crc32(key)):
        return None
    sequence, slot, checksum = _HEAD.unpack_from(body)
    parent = BlockKey(body[_HEAD.size :]) if len(body) > _HEAD.size else None
    return BlockRecord(sequence, BlockKey(key), slot, checksum, parent)


def sequence_of(value: bytes) -> int:
    sequence: int = _HEAD.unpack_from(value)[0]
    return sequence


@dataclass(slots=True)
class RecoveredIndex:
    blocks: list[BlockRecord] = field(default_factory=list)  # oldest first, each after its parent
    dropped: list[bytes] = field(default_factory=list)  # keys of unusable entries
    num_orphans: int = 0
    num_lost: int = 0
    next_sequence: int = 0


def recover(
    entries: Iterable[tuple[bytes, bytes]], whole_slots: Sequence[int], slots_per_segment: int, max_slots: int
) -> RecoveredIndex:
    """Choose the usable ``entries`` (key, encoded record). ``whole_slots``: slots in each segment's file.

    Lost: damaged records, missing slots, and slots claimed twice (neither claim is used). Orphans: blocks
    without every predecessor, which cannot be reached.
    """
    result = RecoveredIndex()
    records = []
    for key, value in entries:
        record = decode(key, value)
        if record is None:
            result.dropped.append(key)
        else:
            records.append(record)
    claims = Counter(record.slot for record in records)
    # A block is written after its predecessor, so one pass in this order finds it.
    records.sort()
    held: set[BlockKey] = set()
    for record in records:
        segment, at = divmod(record.slot, slots_per_segment)
        there = record.slot < max_slots and segment < len(whole_slots) and at < whole_slots[segment]
        if not there or claims[record.slot] > 1:
            result.dropped.append(record.key)
        elif record.parent is not None and record.parent not in held:
            result.num_orphans += 1
            result.dropped.append(record.key)
        else:
            held.add(record.key)
            result.blocks.append(record)
    result.num_lost = len(result.dropped) - result.num_orphans
    if records:
        result.next_sequence = records[-1].sequence + 1
    return result
