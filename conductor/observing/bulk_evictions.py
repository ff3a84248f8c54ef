"""Evictions in bulk: a good part of a node's tier that went at once, which somebody should know of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.kvstore.index.redis.node_record import NodeRecord

Totals = Mapping[str, int]  # blocks by reason, since the node's process began

# What counts as in bulk: this part of the tier, and so many blocks, within a second or a heartbeat.
_PART = 0.1
_LEAST_BLOCKS = 64
_WINDOW_S = 1.0
# While it goes on it is told again after so long, and not with each heartbeat.
_AGAIN_S = 30.0


@dataclass(slots=True)
class _Seen:
    epoch: int
    at_s: float  # when ``before`` was told
    before: Totals
    told_s: float = float("-inf")
    told: Totals | None = None  # the totals when it was last told


class EvictionWatch:
    """Looks at the totals in nodes' heartbeats. Remembers two of them for each tier of a node."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Seen] = {}

    def heard(self, record: NodeRecord, now_s: float) -> list[str]:
        """A sentence for each tier of which much has gone; usually none."""
        told = []
        for tier, totals in evicted_blocks(record).items():
            room = record.load.num_blocks if tier == "pool" else 0
            if tier in record.tiers:
                room = record.tiers[tier].num_blocks
            sentence = self._look((record.node_id, tier), record.epoch, totals, room, now_s)
            if sentence:
                told.append(sentence)
        return told

    def left(self, node_id: str) -> None:
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] != node_id}

    def _look(self, key: tuple[str, str], epoch: int, totals: Totals, room: int, now_s: float) -> str:
        seen = self._seen.get(key)
        if seen is None or seen.epoch != epoch:
            self._seen[key] = _Seen(epoch, now_s, totals)
            return ""
        span_s, gone = now_s - seen.at_s, _difference(totals, seen.before)
        if span_s >= _WINDOW_S:
            seen.at_s, seen.before = now_s, totals
        num_gone = sum(gone.values())
        if num_gone < max(_PART * room * max(span_s, 1.0), _LEAST_BLOCKS) or now_s - seen.told_s < _AGAIN_S:
            return ""
        seen.at_s, seen.before = now_s, totals
        since = sum(_difference(totals, seen.told).values()) if seen.told is not None else 0
        seen.told_s, seen.told = now_s, totals
        by_reason = ", ".join(f"{reason} {count:,}" for reason, count in gone.items())
        of = f" of {room:,}" if room else ""
        told = f"{num_gone:,}{of} blocks left {key[1]} within {max(span_s, 0.1):.1f} s ({by_reason})"
        return told + (f"; {since:,} since this was last said" if since > num_gone else "")


def evicted_blocks(record: NodeRecord) -> dict[str, Totals]:
    """What a node says it has evicted, by tier; nothing of what is not a count."""
    told = record.extra.get("evicted")
    return {
        tier: {reason: count for reason, count in reasons.items() if isinstance(count, int)}
        for tier, reasons in (told.items() if isinstance(told, dict) else ())
        if isinstance(reasons, dict)
    }


def _difference(now: Totals, before: Totals) -> dict[str, int]:
    more = {reason: count - before.get(reason, 0) for reason, count in now.items()}
    return {reason: count for reason, count in more.items() if count > 0}
