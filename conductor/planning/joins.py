"""How long nodes took to join, as they say themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable

from moonpool.conductor.fleet.member import Member
from moonpool.conductor.planning.observation import UNKNOWN_JOIN_S
from moonpool.kvstore.index.redis.node_record import JOIN_PHASES

FIRST_TOKEN = "first_token"


def longest_join_s(members: Iterable[Member]) -> float:
    """The longest of these nodes; ``UNKNOWN_JOIN_S`` where none is known."""
    return max((_join_s(member) for member in members), default=UNKNOWN_JOIN_S)


def join_phases(members: Iterable[Member]) -> dict[str, float]:
    """The longest of these nodes in each phase of their start, and until their first token, in seconds."""
    found: dict[str, float] = {}
    for member in members:
        given = member.record.extra.get("join")
        known = {phase: given.get(phase) for phase in JOIN_PHASES} if isinstance(given, dict) else {}
        for phase, seconds in {**known, FIRST_TOKEN: member.first_token_s}.items():
            if isinstance(seconds, int | float) and math.isfinite(seconds):
                found[phase] = max(found.get(phase, 0.0), round(float(seconds), 3))
    return found


def _join_s(member: Member) -> float:
    value = member.record.extra.get("join_s")
    return float(value) if isinstance(value, int | float) else UNKNOWN_JOIN_S
