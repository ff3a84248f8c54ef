"""Bulk evictions: events when a large part of a node's tier was evicted at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.kvstore.index.redis.node_record import NodeRecord

Totals = Mapping[str, int]  # evicted blocks by reason, since the start of the node

# In bulk: this part of the tier and this many blocks within a second or a heartbeat.
_PART = 0.1
_LEAST_BLOCKS = 64
_WINDOW_S = 1.0
# The least time between two events of one tier.
_AGAIN_S = 30.0


@dataclass(slots=True)
class _Seen:
    epoch: int
    at_s: float  # when ``before`` was reported
    before: Totals
    event_s: float = float("-inf")
    at_event: Totals | None = None  # totals at the latest event


class EvictionWatch:
    """Compares the totals in heartbeats, for each tier of a node."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Seen] = {}

    def on_heartbeat(self, record: NodeRecord, now_s: float) -> list[str]:
        """A sentence for each tier with bulk evictions; usually none."""
        sentences = []
        for tier, totals in evicted_blocks(record).items():
            room = record.load.num_blocks if tier == "pool" else 0
            if tier in record.tiers:
                room = record.tiers[tier].num_blocks
            sentence = self._look((record.node_id, tier), record.epoch, totals, room, now_s)
            if sentence:
                sentences.append(sentence)
        return sentences

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
        if num_gone < max(_PART * room * max(span_s, 1.0), _LEAST_BLOCKS) or now_s - seen.event_s < _AGAIN_S:
            return ""
        seen.at_s, seen.before = now_s, totals
        since = sum(_difference(totals, seen.at_event).values()) if seen.at_event is not None else 0
        seen.event_s, seen.at_event = now_s, totals
        by_reason = ", ".join(f"{reason} {count:,}" for reason, count in gone.items())
        of = f" of {room:,}" if room else ""
        span = f"{max(span_s, 0.1):.1f} s"
        text = f"{num_gone:,}{of} blocks were evicted from {key[1]} within {span} ({by_reason})"
        return text + (f"; {since:,} since the last such event" if since > num_gone else "")


def evicted_blocks(record: NodeRecord) -> dict[str, Totals]:
    """The totals that a node reports, by tier; invalid entries are left out."""
    reported = record.extra.get("evicted")
    return {
        tier: {reason: count for reason, count in reasons.items() if isinstance(count, int)}
        for tier, reasons in (reported.items() if isinstance(reported, dict) else ())
        if isinstance(reasons, dict)
    }


def _difference(now: Totals, before: Totals) -> dict[str, int]:
    more = {reason: count - before.get(reason, 0) for reason, count in now.items()}
    return {reason: count for reason, count in more.items() if count > 0}
