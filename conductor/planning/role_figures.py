"""What the nodes of a role tell: what waits for them, the room in their pools, and how long they joined."""

from __future__ import annotations

import math
from collections.abc import Iterable

from moonpool.conductor.fleet.member import Member
from moonpool.conductor.planning.observation import UNKNOWN_JOIN_S
from moonpool.kvstore.index.redis.node_record import JOIN_PHASES, stages_of

FIRST_TOKEN = "first_token"


def of_role(members: Iterable[Member], role: str) -> list[Member]:
    """The members that serve a stage; ``both``: those of that role."""
    if role == "both":
        return [one for one in members if one.record.role == role]
    return [one for one in members if role in stages_of(one.record.role)]


def queue_s(members: Iterable[Member], role: str, now_s: float) -> float:
    """How long a request waits that comes now, on average over the nodes of a role: for the prompts before
    it, and for blocks that others hold while they decode."""
    found = of_role(members, role)
    waits_s = 0.0
    for one in found:
        if role != "decode":
            waits_s += one.view.queue.wait_s(now_s) + one.view.foreign_queue_s
        if role != "prefill":
            waits_s += one.load.schedule.wait_s(one.view.num_waiting)
    return waits_s / max(len(found), 1)


def kv_free(members: Iterable[Member], role: str) -> float:
    """The fraction of blocks that sequences do not hold; 1 without a node."""
    loads = [one.record.load for one in of_role(members, role)]
    num_blocks = sum(load.num_blocks for load in loads)
    return sum(load.free_blocks for load in loads) / num_blocks if num_blocks else 1.0


def longest_join_s(members: Iterable[Member]) -> float:
    """The longest of these nodes; ``UNKNOWN_JOIN_S`` where none is known."""
    told = [member.record.extra.get("join_s") for member in members]
    known = [float(one) if isinstance(one, int | float) else UNKNOWN_JOIN_S for one in told]
    return max(known, default=UNKNOWN_JOIN_S)


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
