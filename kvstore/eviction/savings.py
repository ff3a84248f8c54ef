"""What a hit saves: the time to compute a block, or to bring it from a slower tier, less that to load it.

All blocks of a tier have one size, so that what is saved for a slot is what is saved for a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.runtime.cost_profile import CostProfile

# Where in its chain a block is (0: the first) -> seconds that a hit of it saves; more than 0.
SavedSeconds = Callable[[int], float]

# A hit never saves less than so much of what computing takes: rates are estimates, and a tier that saves
# nothing today may do so when the machine is busier.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one tier of a node, as the node measured them; rates of 0 are not known, or there is no such
    tier."""

    block_size: int  # tokens
    block_nbytes: int
    profile: CostProfile[float]
    load_nbytes_per_s: float  # from this tier
    below_nbytes_per_s: float = 0.0  # from the tier that takes in what this one evicts


def saved_s(costs: Costs, position: int) -> float:
    """Seconds a hit of the block at ``position`` of its chain saves; 1 where computing was not measured.

    The deeper it lies, the more tokens each of its own attends to, and the more it saves; unless it is on a
    slower tier too, from where it comes at the same price as any other.
    """
    compute_s = costs.profile.tokens_s(costs.block_size, position * costs.block_size)
    if compute_s <= 0:
        return 1.0
    lost_s = compute_s
    if costs.below_nbytes_per_s:
        lost_s = min(lost_s, costs.block_nbytes / costs.below_nbytes_per_s)
    load_s = costs.block_nbytes / costs.load_nbytes_per_s if costs.load_nbytes_per_s else 0.0
    return max(lost_s - load_s, _LEAST_SHARE * compute_s)
