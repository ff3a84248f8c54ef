"""What the index on disk says of one block."""

from __future__ import annotations

import struct
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
