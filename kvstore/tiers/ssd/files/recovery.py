"""What of an index found on the disk can be used again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers.ssd.files.record import BlockRecord, decode


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
