"""What the index on disk says of one block."""

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
    """``sequence`` orders records by when they were written: a block comes after the one before it in its
    chain."""

    sequence: int
    key: BlockKey
    slot: int
    checksum: int  # xxh3-64 of the block's bytes
    parent: BlockKey | None


class StaleRecord(NamedTuple):
    """A record on disk that does not hold any more. ``sequence`` tells it from a later one of the same block,
    perhaps in the same slot."""

    key: BlockKey
    slot: int
    sequence: int


def encode(record: BlockRecord) -> bytes:
    """The value under ``record.key``, with a checksum of its own."""
    body = _HEAD.pack(record.sequence, record.slot, record.checksum) + (record.parent or b"")
    return body + _CRC.pack(crc32(body, crc32(record.key)))


def decode(key: bytes, value: bytes) -> BlockRecord | None:
    """None: these bytes are not a record of this key."""
    if len(value) not in _LENGTHS or len(key) != KEY_NBYTES:
        return None
    body = value[: -_CRC.size]
    if _CRC.unpack_from(value, len(body))[0] != crc32(body, crc32(key)):
        return None
    sequence, slot, checksum = _HEAD.unpack_from(body)
    parent = BlockKey(body[_HEAD.size :]) if len(body) > _HEAD.size else None
    return BlockRecord(sequence, BlockKey(key), slot, checksum, parent)


def sequence_of(value: bytes) -> int:
    """The sequence in an encoded record."""
    sequence: int = _HEAD.unpack_from(value)[0]
    return sequence


@dataclass(slots=True)
class RecoveredIndex:
    blocks: list[BlockRecord] = field(default_factory=list)  # oldest first, each after its parent
    dropped: list[bytes] = field(default_factory=list)  # keys of entries that are no use
    num_orphans: int = 0
    num_lost: int = 0
    next_sequence: int = 0


def recover(
    entries: Iterable[tuple[bytes, bytes]], whole_slots: Sequence[int], slots_per_segment: int, max_slots: int
) -> RecoveredIndex:
    """Sort out ``entries`` (key, encoded record). ``whole_slots``: slots that each segment's file has.

    Lost: damaged records, slots that are not there, and slots claimed twice (neither claim is believed).
    Orphans: blocks without every block before them in their chain; nobody could reach them.
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
    # A block is written after those before it in its chain, so that one pass in this order finds its parent.
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
