"""The tiers of a node."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Fastest first. A block in several tiers is published under the fastest."""

    POOL = 0  # the engine's paged pool
    HOST = 1  # host memory
    SSD = 2
