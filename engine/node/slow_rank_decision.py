"""What becomes of a node with a rank that stays slow: a pure decision with hysteresis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

LOOK_S = 0.5
"""Seconds between two looks at the ranks."""
WINDOW_S = 60.0
"""Older looks are forgotten."""
# A rank stays slow if it was slow for so long, in this part of the looks since: others showed it to be fast.
_STAYS_S, _STAYS_PART = 30.0, 0.8
# Fewer looks at ranks under load prove nothing.
_LEAST_LOOKS = 20
# What is slow again so soon after a life began would be so in the next one, too.
LEAST_LIFE_S = 300.0
# New ranks beside this process did not help if one is slow again within this time.
_REGROUP_HELPS_S = 3600.0


class Remedy(StrEnum):
    """What ends a node's life after its requests have left. The words of ``engine.parallel.slow_rank``."""

    OFF = "off"
    DRAIN = "drain"  # the process ends; what supervises it may start another
    REGROUP = "regroup"  # other ranks join this process


@dataclass(frozen=True, slots=True)
class Look:
    """The ranks under load, at a time. ``rank``: the slowest slow one; None: none is slow."""

    at_s: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``since_s``: when the rank was first seen slow."""

    rank: int
    since_s: float
    remedy: Remedy


def decide(
    policy: Remedy, looks: Sequence[Look], *, now_s: float, life_s: float, regrouped_s: float | None = None
) -> Verdict | None:
    """Return what to do about a rank that stays slow, or None.

    A rank that is slow now and then does not stay slow; nor does anything happen within ``LEAST_LIFE_S`` of
    the beginning of a life, so that a node ends at most once in that time whatever its ranks do. Rank 0 is
    the node's own process, which only a drain replaces.

    Args:
        looks: in the order of time, at ranks that had steps to run.
        life_s: since the node got ready.
        regrouped_s: since its ranks were replaced for this reason; None: never.
    """
    if policy is Remedy.OFF or life_s < LEAST_LIFE_S:
        return None
    recent = [look for look in looks if look.at_s > now_s - WINDOW_S]
    rank = recent[-1].rank if recent else None
    if rank is None:
        return None
    slow_s = [look.at_s for look in recent if look.rank == rank]
    since = [look for look in recent if look.at_s >= slow_s[0]]
    if (
        slow_s[-1] - slow_s[0] < _STAYS_S
        or len(slow_s) < _LEAST_LOOKS
        or len(slow_s) < _STAYS_PART * len(since)
    ):
        return None
    helped = regrouped_s is None or regrouped_s > _REGROUP_HELPS_S
    return Verdict(rank, slow_s[0], policy if rank and helped else Remedy.DRAIN)
