"""A batch of index changes as bytes: groups of ``op u8 | count u32 | count keys of 16 bytes``.

``op`` is the tier of the keys, or ``REMOVED``. A batch names each key once, so the order of its groups has no
meaning; batches are applied in order, and applying one twice is harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from struct import Struct

import numpy as np

from moonpool.kvstore.blocks.keys import KEY_NBYTES, BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import ChangesCorrupt

REMOVED = 255

_GROUP = Struct("<BI")
_OPS = frozenset([*map(int, Tier), REMOVED])


def encode(stored: Mapping[BlockKey, Tier], removed: Iterable[BlockKey]) -> bytes:
    tiers, gone = set(stored.values()), list(removed)
    groups: list[tuple[int, Collection[BlockKey]]] = [(REMOVED, gone)] if gone else []
    if len(tiers) == 1:  # nearly always: then no key is looked at
        groups.append((int(tiers.pop()), stored))
    else:
        groups += [(int(tier), [key for key in stored if stored[key] == tier]) for tier in sorted(tiers)]
    return b"".join(_GROUP.pack(op, len(keys)) + b"".join(keys) for op, keys in groups)


def batches(held: Iterable[tuple[BlockKey, Tier]], num_keys: int) -> Iterator[bytes]:
    """Encode all blocks, ``num_keys`` to a batch."""
    rest = iter(held)
    while batch := dict(islice(rest, num_keys)):
        yield encode(batch, ())


def decode(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield ``(op, packed keys)`` of each group. Raises ``ChangesCorrupt`` at the first invalid byte."""
    at = 0
    while at < len(data):
        if at + _GROUP.size > len(data):
            raise ChangesCorrupt(f"a group's head is cut off at byte {at} of {len(data)}")
        op, count = _GROUP.unpack_from(data, at)
        start = at + _GROUP.size
        at = start + count * KEY_NBYTES
        if op not in _OPS or at > len(data):
            raise ChangesCorrupt(
                f"group at byte {start - _GROUP.size} (op {op}, {count} keys) does not fit {len(data)} bytes"
            )
        yield op, data[start:at]


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_NBYTES] for at in range(0, len(packed), KEY_NBYTES)]


def pick(packed: bytes, part: int, num_parts: int) -> list[bytes]:
    """The keys of a packed run with a last byte of ``part`` modulo ``num_parts``."""
    last = np.frombuffer(packed, np.uint8)[KEY_NBYTES - 1 :: KEY_NBYTES]
    offsets: list[int] = (np.flatnonzero(last % num_parts == part) * KEY_NBYTES).tolist()
    return [packed[at : at + KEY_NBYTES] for at in offsets]
