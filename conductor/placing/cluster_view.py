"""What placement looks at: nodes as they are now, and who holds how much of a request's prefix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.placing.node_table import NodeTable


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """What placement must know of a request. Placed again, its tokens already streamed count as prompt."""

    num_tokens: int
    remaining_tokens: int  # it may still produce
    expected_tokens: int  # it will probably produce
    deadline_s: float  # seconds from now
    reads_cache: bool = True  # False: every prompt token must be computed
    fairness_delay_s: float = 0.0  # prefills that come within this time go first, whatever the policy


@dataclass(frozen=True, slots=True)
class ClusterView:
    """``prefix_blocks`` says how many leading blocks of the request each node holds, in whatever tier;
    ``slow_blocks`` how many of those are in host memory and on SSD, where there are any.
    """

    prefill: NodeTable
    decode: NodeTable
    prefix_blocks: Mapping[str, int]
    links: LinkModel
    block_size: int  # tokens
    block_nbytes: int
    now_s: float
    turn: int = 0  # how many placements were made before: what round-robin counts by
    draw: float = 0.0  # uniform in [0, 1): what random draws by
    slow_blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    avoid: Collection[str] = ()  # nodes to take only when there is no other of their role
